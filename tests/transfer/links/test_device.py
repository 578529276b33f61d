"""The links to a device, over a fake device."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice, FakeEvent, FakeQueue

from promoe.scheduler import ExpertKey
from promoe.stores import HostStore
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.link_timetable import IN_FLIGHT
from promoe.transfer.links import HostLink, Link
from promoe.transfer.links.device import DeviceLink
from promoe.transfer.links.pinned import PinnedLink
from promoe.transfer.links.pinned_cache import CachedLink

EXPERTS, ROWS, COLUMNS = 5, 24, 64
CHUNK_BYTES = 4096


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(EXPERTS, ROWS, COLUMNS, generator=draw) for name in ("up", "down")}


@pytest.fixture
def store(tensors: dict[str, torch.Tensor]) -> HostStore:
    return HostStore([tensors], CHUNK_BYTES)


def link_over(source: str, store: HostStore, device: FakeDevice) -> DeviceLink:
    if source == "unpinnable":
        device.unpinnable_bytes = 1
    if source in ("pinned", "unpinnable"):
        return PinnedLink(store, device)
    assert source == "cached"
    return CachedLink(HostLink(store), store, device, nbytes=0)


@pytest.mark.parametrize("source", ["pinned", "unpinnable", "cached"])
def test_an_expert_is_there_for_who_waits(source: str, store: HostStore, tensors: dict[str, torch.Tensor]) -> None:
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], 2, device), link_over(source, store, device)
    assert isinstance(link, Link)
    draw = random.Random(0)
    for expert_idx in (*range(EXPERTS), 0, 3):
        slot = draw.randrange(2)
        for chunk in store.chunks(ExpertKey(0, expert_idx)):
            link.transfer(chunk, pool.slot(slot), pool.address(slot))
        pool.begin_read([slot])
        for name, stack in tensors.items():
            assert torch.equal(pool.tensors(slot)[name], stack[expert_idx])
        pool.end_read([slot])
    link.close()


def test_at_most_two_copies_are_in_flight(store: HostStore) -> None:
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], 1, device), link_over("pinned", store, device)
    chunks = store.chunks(ExpertKey(0, 1))
    assert len(chunks) > IN_FLIGHT
    for number, chunk in enumerate(chunks, 1):
        link.transfer(chunk, pool.slot(0), 0)
        assert device.host_waits == max(0, number - IN_FLIGHT)
    link.close()
    assert device.host_waits == len(chunks), "the host's memory is given back when nothing reads it any more"


@pytest.mark.parametrize("source", ["pinned", "unpinnable", "cached"])
def test_it_queues_what_is_pinned_where_it_lies(source: str, store: HostStore) -> None:
    link = link_over(source, store, FakeDevice())
    assert link.queues is (source == "pinned")
    link.close()


def test_several_chunks_at_once_wait_for_nothing_and_arrive_together(
    store: HostStore, tensors: dict[str, torch.Tensor]
) -> None:
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], EXPERTS, device), link_over("pinned", store, device)
    marks = len(device.queues[-1]._work)
    link.transfer_all([(chunk, pool.slot(idx)) for idx in range(EXPERTS) for chunk in store.chunks(ExpertKey(0, idx))])
    assert device.host_waits == 0
    events = [work for work in device.queues[-1]._work if isinstance(work, FakeEvent)]
    assert len(events) - marks == 1
    pool.begin_read(range(EXPERTS))
    for idx in range(EXPERTS):
        assert all(torch.equal(pool.tensors(idx)[name], stack[idx]) for name, stack in tensors.items())
    link.close()
    with pytest.raises(OSError, match="closed"):
        link.transfer_all([(store.chunks(ExpertKey(0, 0))[0], pool.slot(0))])


def test_who_transfers_one_by_one_waits_for_those_that_came_at_once(store: HostStore) -> None:
    """Speculation never puts many copies before what will be demanded."""
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], EXPERTS, device), link_over("pinned", store, device)
    chunk = store.chunks(ExpertKey(0, 0))[0]
    for _ in range(5):
        link.transfer_all([(chunk, pool.slot(0))])
    assert device.host_waits == 0
    link.transfer(chunk, pool.slot(1), 0)
    assert device.host_waits == 1
    link.close()


@pytest.mark.parametrize("source", ["unpinnable", "cached"])
def test_a_buffer_is_not_written_before_its_copy_was_made(
    source: str, store: HostStore, tensors: dict[str, torch.Tensor]
) -> None:
    """Copies are made as late as possible, and each must still find its own bytes."""
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], EXPERTS, device), link_over(source, store, device)
    for expert_idx in range(EXPERTS):
        for chunk in store.chunks(ExpertKey(0, expert_idx)):
            link.transfer(chunk, pool.slot(expert_idx), 0)
    pool.begin_read(range(EXPERTS))
    for expert_idx in range(EXPERTS):
        assert torch.equal(pool.tensors(expert_idx)["down"], tensors["down"][expert_idx])
    link.close()


def test_what_is_pinned_is_unpinned(store: HostStore, tensors: dict[str, torch.Tensor]) -> None:
    device = FakeDevice()
    link = link_over("pinned", store, device)
    assert {tensor.data_ptr() for tensor in device.pinned} == {tensor.data_ptr() for tensor in tensors.values()}
    assert link.describe() == "pinned memory to fake device, 2 copies in flight"
    link.close()
    assert device.pinned == []


def test_what_cannot_be_pinned_is_said_once(store: HostStore, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    device.unpinnable_bytes = 2 * 2**20
    link = link_over("pinned", store, device)
    (record,) = caplog.records
    assert "2.0 MiB of the experts could not be pinned" in record.message
    assert "(2.0 MiB through buffers)" in link.describe()
    link.close()


def test_copies_that_cannot_be_made_hold_no_buffer(store: HostStore, tensors: dict[str, torch.Tensor]) -> None:
    """The buffer of an expert that could not be copied is free for the next expert."""
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], 1, device), link_over("cached", store, device)
    mark = FakeQueue.mark
    for expert_idx in range(EXPERTS):
        FakeQueue.mark = broken_mark  # type: ignore[method-assign]
        try:
            for chunk in store.chunks(ExpertKey(0, expert_idx)):
                with pytest.raises(RuntimeError, match="no event"):
                    link.transfer(chunk, pool.slot(0), 0)
        finally:
            FakeQueue.mark = mark  # type: ignore[method-assign]
    for expert_idx in range(EXPERTS):
        for chunk in store.chunks(ExpertKey(0, expert_idx)):
            link.transfer(chunk, pool.slot(0), 0)
        pool.begin_read([0])
        assert torch.equal(pool.tensors(0)["up"], tensors["up"][expert_idx])
        pool.end_read([0])
    link.close()


def broken_mark(queue: FakeQueue) -> FakeEvent:
    raise RuntimeError("no event")


@pytest.mark.parametrize("source", ["pinned", "cached"])
def test_a_closed_link_or_store_refuses(source: str, store: HostStore) -> None:
    device = FakeDevice()
    pool, link = DevicePool(store.layouts[0], 1, device), link_over(source, store, device)
    chunk = store.chunks(ExpertKey(0, 0))[0]
    link.close()
    with pytest.raises(OSError, match="closed"):
        link.transfer(chunk, pool.slot(0), 0)
    other = link_over("pinned", store, device)
    store.close()
    with pytest.raises(OSError, match="the store was closed"):
        other.transfer(chunk, pool.slot(0), 0)


def test_files_can_be_the_source(tmp_path: Path) -> None:
    """They are read by the same link that fills slots in RAM."""
    from tiny_checkpoint import write_checkpoint

    from promoe.model.opening import open_without_experts
    from promoe.stores.base import read_expert
    from promoe.transfer.links import FileLink

    store = open_without_experts(write_checkpoint(tmp_path / "checkpoint")).store
    device = FakeDevice()
    slot_bytes = store.layouts[0].slot_bytes
    link = CachedLink(FileLink(store, "page_cache"), store, device, nbytes=0)
    pool = DevicePool(store.layouts[0], 1, device)
    key = ExpertKey(1, 5)
    for chunk in store.chunks(key):
        link.transfer(chunk, pool.slot(0), 0)
    pool.begin_read([0])
    expected = bytearray(slot_bytes)
    read_expert(store, key, memoryview(expected))
    for spec in store.layouts[0].tensors:
        part = slice(spec.offset_bytes, spec.offset_bytes + spec.nbytes)
        assert bytes(pool.slot(0).memory[part].tolist()) == bytes(expected[part])
    assert "of pinned RAM (4 of 24 experts) to fake device" in link.describe()
    link.close()
    store.close()
