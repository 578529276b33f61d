"""Experts that stay in pinned RAM: read once, never written while a copy needs them, never more than was allowed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores import HostStore
from promoe.stores.base import Chunk
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.links import HostLink
from promoe.transfer.links import pinned_cache as module
from promoe.transfer.links.pinned_cache import CachedLink, bytes_for_all_that_fits

EXPERTS, ROWS, COLUMNS = 6, 24, 64
KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(EXPERTS)]


def make_store() -> HostStore:
    """Make a store of two layers, the second with smaller experts, and two chunks per tensor."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((ROWS, COLUMNS), (ROWS // 2, COLUMNS))
    banks = [{name: torch.randn(EXPERTS, *size, generator=draw) for name in ("up", "down")} for size in sizes]
    return HostStore(banks, 4096)


class CountingLink(HostLink):
    """A link that counts what it reads, and may be held up or fail."""

    def __init__(self, store: HostStore, workers: int = 1) -> None:
        super().__init__(store, workers)
        self.reads: Counter[Chunk] = Counter()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.fails = False

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        self.reads[chunk] += 1
        self.begun.set()
        assert self.go_on.wait(60)
        if self.fails:
            raise OSError("injected")
        super().transfer(chunk, destination, address)


class Machine:
    """A store, a few buffers, and slots on a device whose queues run when they are told to."""

    def __init__(self, buffers: int, workers: int = 1, eager: bool = False) -> None:
        self.store = make_store()
        self.device = FakeDevice(eager=eager)
        self.read = CountingLink(self.store, workers)
        slot_bytes = max(layout.slot_bytes for layout in self.store.layouts)
        self.link = CachedLink(self.read, self.store, self.device, buffers * slot_bytes)
        self.pools = [DevicePool(layout, EXPERTS, self.device) for layout in self.store.layouts]

    def fetch(self, key: ExpertKey) -> None:
        pool = self.pools[key.layer_idx]
        for chunk in self.store.chunks(key):
            self.link.transfer(chunk, pool.slot(key.expert_idx), 0)

    def assert_there(self, key: ExpertKey) -> None:
        pool = self.pools[key.layer_idx]
        for name, found in pool.tensors(key.expert_idx).items():
            assert torch.equal(
                found, self.store.tensors[2 * key.layer_idx + ("up", "down").index(name)][key.expert_idx]
            )


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=30), st.integers(2, 5), st.integers(0, 2**32))
@settings(max_examples=60)
def test_every_copy_has_the_bytes_of_its_expert(keys: list[ExpertKey], buffers: int, seed: int) -> None:
    machine, draw = Machine(buffers), random.Random(seed)
    resident: list[ExpertKey] = []
    for key in keys:
        before = machine.read.reads.total()
        machine.fetch(key)
        read = machine.read.reads.total() - before
        assert read == (0 if key in resident else len(machine.store.chunks(key))), (
            "the least recently used one made room"
        )
        resident = [*(other for other in resident if other != key), key][-buffers:]
        machine.device.run_some(draw, draw.randrange(6))
    machine.device.run_all(draw)
    for key in set(keys):
        machine.assert_there(key)
    assert machine.link.nbytes <= buffers * max(layout.slot_bytes for layout in machine.store.layouts)
    machine.link.close()
    assert machine.device.pinned == []


def test_without_waiting_for_copies_they_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail."""
    monkeypatch.setattr(module, "_wait_for_all", lambda events: None)
    monkeypatch.setattr("promoe.transfer.links.device.IN_FLIGHT", 100)
    machine = Machine(2)
    for key in KEYS:
        machine.fetch(key)
    machine.device.run_all(random.Random(0))
    with pytest.raises(AssertionError):
        machine.assert_there(KEYS[0])


def test_two_workers_that_want_the_same_chunk_read_it_once() -> None:
    machine = Machine(4, workers=2, eager=True)
    chunk = machine.store.chunks(KEYS[0])[0]
    machine.read.go_on.clear()
    threads = [
        threading.Thread(target=machine.link.transfer, args=(chunk, machine.pools[0].slot(i), 0)) for i in (0, 1)
    ]
    threads[0].start()
    assert machine.read.begun.wait(60)
    threads[1].start()
    machine.read.go_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert machine.read.reads == {chunk: 1}


def test_a_read_that_fails_is_tried_again() -> None:
    machine = Machine(2, eager=True)
    machine.read.fails = True
    for _ in range(5):  # more often than there are buffers
        with pytest.raises(OSError, match="injected"):
            machine.fetch(KEYS[0])
    machine.read.fails = False
    for key in KEYS:
        machine.fetch(key)
    machine.device.run_all(random.Random(0))
    for key in KEYS:
        machine.assert_there(key)


def test_many_threads() -> None:
    machine = Machine(6, workers=3, eager=True)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for key in (
                random.Random(seed).choices(KEYS[seed::3], k=20) + KEYS[seed::3]
            ):  # no slot is written by two at once
                machine.fetch(key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    machine.device.run_all(random.Random(0))
    for key in KEYS:
        machine.assert_there(key)


def test_events_of_an_expert_that_stays_do_not_pile_up() -> None:
    machine = Machine(2, eager=True)
    for _ in range(100):
        machine.fetch(KEYS[0])
    (buffer,) = machine.link._held.values()
    assert len(buffer.copied) <= module.MOST_EVENTS


def test_a_closed_link_refuses_and_lets_go() -> None:
    machine = Machine(2, eager=True)
    machine.link.close()
    with pytest.raises(OSError, match="closed"):
        machine.fetch(KEYS[0])
    assert machine.device.pinned == []


def test_it_says_what_stays_and_what_it_cannot_pin(caplog: pytest.LogCaptureFixture) -> None:
    device, store = FakeDevice(), make_store()
    device.unpinnable_bytes = 2**20
    slot_bytes = store.layouts[0].slot_bytes
    link = CachedLink(HostLink(store), store, device, 5 * slot_bytes + 1)
    assert link.describe().startswith("host memory, kept in 60.0 KiB of pinned RAM (5 of 12 experts) to fake device")
    assert "1.0 MiB of RAM for experts could not be pinned" in caplog.text
    link.close()
    with pytest.raises(ConfigError, match=r"at least 49152 bytes here: 4 experts of .* Got 49151 instead"):
        CachedLink(HostLink(store, workers=2), store, device, 4 * slot_bytes - 1)


def test_by_default_as_many_stay_as_free_ram_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    slot_bytes = store.layouts[0].slot_bytes
    for free, expected in (
        (None, 0),
        (module.SPARE_RAM_BYTES, 0),
        (module.SPARE_RAM_BYTES + 4 * slot_bytes - 1, 0),
        (module.SPARE_RAM_BYTES + 4 * slot_bytes, 4 * slot_bytes),
        (2**40, 12 * slot_bytes),
    ):
        monkeypatch.setattr(module, "free_ram_bytes", lambda free=free: free)
        assert bytes_for_all_that_fits(store, 2) == expected
