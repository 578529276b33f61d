"""Slots on a device: a read after what was written, a write after what reads, whatever the queues do meanwhile."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, FakeQueue
from hypothesis import given
from hypothesis import strategies as st

from promoe.errors import ConfigError
from promoe.stores.layout import ExpertLayout
from promoe.transfer.device_pool import DevicePool, DeviceSlot

LAYOUT = ExpertLayout.of({"up": (torch.Size([4, 16]), torch.float32), "down": (torch.Size([16, 4]), torch.float32)})


def test_tensors_are_views_over_the_slot() -> None:
    device = FakeDevice()
    pool = DevicePool(LAYOUT, 3, device)
    assert pool.nbytes == 3 * LAYOUT.slot_bytes
    tensors = pool.tensors(1)
    assert pool.tensors(1) is tensors
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"up": (4, 16), "down": (16, 4)}
    assert tensors["up"].isnan().all()
    pool.slot(1).memory.zero_()
    assert not tensors["up"].any()
    assert pool.tensors(0)["down"].isnan().all()
    assert pool.address(2) - pool.address(1) == LAYOUT.slot_bytes
    pool.poison()
    assert tensors["down"].isnan().all()
    pool.close()
    pool.close()


def test_no_slots_and_no_memory_are_said() -> None:
    with pytest.raises(ConfigError, match="at least 1 slot"):
        DevicePool(LAYOUT, 0, FakeDevice())
    with pytest.raises(ConfigError, match="Choose a smaller cache"):
        DevicePool(LAYOUT, 2, FakeDevice(memory_bytes=LAYOUT.slot_bytes))


class Machine:
    """Writes and reads some slots at a time through queues that run as they like, and remembers what every read saw."""

    def __init__(self, readers: int) -> None:
        self.device = FakeDevice(eager=False)
        self.slots = [DeviceSlot(torch.full((1,), 255, dtype=torch.uint8)) for _ in range(3)]
        self.copies = self.device.new_queue()
        self.readers: list[FakeQueue] = [self.device.compute, *(self.device.new_queue() for _ in range(readers - 1))]
        self.written = [255] * len(self.slots)
        self.seen: list[tuple[int, int]] = []  # what was to be read, what was

    def write(self, some: int, value: int) -> None:
        awaited: set[Any] = set()
        chosen = self._chosen(some)
        for idx in chosen:
            self.slots[idx].begin_write(self.copies, awaited)
            self.copies.copy_all([(self.slots[idx].memory, torch.tensor([value], dtype=torch.uint8))])
            self.written[idx] = value
        copied = self.copies.mark()
        for idx in chosen:
            self.slots[idx].end_write(copied)

    def read(self, some: int, reader: int) -> None:
        queue = self.readers[reader % len(self.readers)]
        awaited: set[Any] = set()
        chosen = self._chosen(some)
        for idx in chosen:
            self.slots[idx].begin_read(queue, queue.key, awaited)
            queue.put(partial(self._see, self.slots[idx], self.written[idx]))
        read = queue.mark()
        for idx in chosen:
            self.slots[idx].end_read(queue.key, read)

    def _chosen(self, some: int) -> list[int]:
        return [idx for idx in range(len(self.slots)) if some >> idx & 1]

    def _see(self, slot: DeviceSlot, expected: int) -> None:
        self.seen.append((expected, int(slot.memory)))


some_slots = st.integers(1, 7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), some_slots, st.integers(0, 254)),
        st.tuples(st.just("read"), some_slots, st.integers(0, 2)),
        st.tuples(st.just("run"), st.integers(1, 8), st.just(0)),
    ),
    max_size=40,
)


@given(operations, st.integers(1, 3), st.integers(0, 2**32))
def test_every_read_sees_the_last_write_before_it(todo: list[tuple[str, int, int]], readers: int, seed: int) -> None:
    machine, draw = Machine(readers), random.Random(seed)
    for name, number, other in todo:
        if name == "run":
            machine.device.run_some(draw, number)
        else:
            getattr(machine, name)(number, other)
    machine.device.run_all(draw)
    assert len(machine.seen) == sum(number.bit_count() for name, number, _ in todo if name == "read")
    assert all(expected == found for expected, found in machine.seen)
    assert machine.device.host_waits == 0, "the host waits for nothing that a queue can wait for"


@pytest.mark.parametrize("forgotten", ["begin_read", "end_read", "begin_write"])
def test_without_any_one_of_its_waits_it_would_be_wrong(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail."""
    monkeypatch.setattr(DeviceSlot, forgotten, lambda *args: None)
    wrong = 0
    for seed in range(50):
        machine, draw = Machine(2), random.Random(seed)
        for number in range(6):
            machine.write(7, number)
            machine.read(7, number)
        machine.device.run_all(draw)
        wrong += any(expected != found for expected, found in machine.seen)
    assert wrong > 0


@pytest.mark.parametrize("num_slots", [2, 5])
def test_with_another_number_of_slots_what_is_kept_is_where_it_was_said_to_be(num_slots: int) -> None:
    """Also what is still on its way by copies that come late, and nothing is freed under a kernel that reads it."""
    device = FakeDevice(eager=False)
    pool = DevicePool(LAYOUT, 3, device)
    copies = device.new_queue()
    for idx in range(3):
        slot = pool.slot(idx)
        slot.begin_write(copies, set())
        copies.copy_all([(slot.memory, torch.full_like(slot.memory, idx + 1))])
        slot.end_write(copies.mark())
    kept = {0: 1, 2: 0} if num_slots == 2 else {0: 0, 1: 1, 2: 2}
    pool.resize(num_slots, kept, pool.room_for(num_slots))
    assert pool.nbytes == num_slots * LAYOUT.slot_bytes
    for source, target in kept.items():
        assert (pool.slot(target).memory == source + 1).all()
        assert all((tensor.view(torch.uint8) == source + 1).all() for tensor in pool.tensors(target).values())
        row = pool.rows([7], [target])[7]
        assert (row["up"].view(torch.uint8) == source + 1).all()


def test_without_memory_for_other_slots_the_old_ones_stay() -> None:
    pool = DevicePool(LAYOUT, 2, FakeDevice(memory_bytes=4 * LAYOUT.slot_bytes))
    pool.slot(1).memory.fill_(7)
    with pytest.raises(ConfigError, match="Choose a smaller cache"):
        pool.resize(5, {1: 1}, pool.room_for(5))
    assert pool.num_slots == 2
    assert (pool.slot(1).memory == 7).all()
