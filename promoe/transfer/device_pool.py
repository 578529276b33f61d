"""Slots on a device, and when a slot may be read or overwritten.

A copy into a slot waits for the kernels that read what was there. A kernel that reads a slot waits for the copies. Both
waits are put into queues: the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from promoe.errors import ConfigError
from promoe.transfer.devices import Device, Event, Queue
from promoe.transfer.memory import POISON_BYTE, SLOT_ALIGNMENT_BYTES
from promoe.transfer.rows import FormattedRows, SlotRows

if TYPE_CHECKING:
    from promoe.stores.layout import ExpertLayout, TensorSpec


class DeviceSlot:
    """The bytes of one slot. The scheduler sees to it that a slot is never written and read at once.

    Args:
        memory: `[slot_bytes]` uint8 on the device.
    """

    __slots__ = ("_arrived", "_awaited", "_reads", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._arrived: Event | None = None
        self._awaited: set[Hashable] = set()  # queues that wait for `_arrived` already
        self._reads: dict[Hashable, Event] = {}  # queue -> a place after its latest read

    def begin_write(self, queue: Queue, awaited: set[Event]) -> None:
        """Allow what `queue` is given from now on to overwrite the slot. It waits for events in `awaited` already."""
        for read in self._reads.values():
            if read not in awaited:
                queue.wait(read)
                awaited.add(read)
        self._reads.clear()

    def end_write(self, arrived: Event) -> None:
        """Note that all writes that were put into a queue are before `arrived`."""
        self._arrived = arrived
        self._awaited.clear()

    def begin_read(self, queue: Queue, key: Hashable, awaited: set[Event]) -> None:
        """Allow what `queue` is given from now on to read what was written.

        Args:
            queue: where the kernels go.
            key: the queue's key.
            awaited: events that the queue waits for already; added to.
        """
        arrived = self._arrived
        if arrived is None or key in self._awaited:
            return
        if arrived not in awaited:
            queue.wait(arrived)
            awaited.add(arrived)
        self._awaited.add(key)

    def end_read(self, key: Hashable, read: Event) -> None:
        """Note that all reads that were put into the queue of this `key` are before `read`."""
        self._reads[key] = read

    def wait_for_reads(self) -> None:
        """Return when no kernel reads the slot any more."""
        for read in self._reads.values():
            read.wait_on_host()


class DevicePool:
    """A pool of `num_slots` slots of one layout on a device, as `SlotPool` is one in RAM.

    Args:
        layout: how one expert lies in a slot.
        num_slots: at least 1.
        device: where the slots are.

    Raises:
        ConfigError: there is no slot, or the device has not enough memory.
    """

    def __init__(self, layout: ExpertLayout, num_slots: int, device: Device) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"A slot pool needs at least 1 slot ({layout.slot_bytes} bytes). Got {num_slots} instead."
            )
        assert layout.slot_bytes % SLOT_ALIGNMENT_BYTES == 0, layout.slot_bytes
        self.layout = layout
        self._formats = layout.formats
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_bytes
        self._device = device
        self._memory: torch.Tensor | None = device.allocate(self.nbytes)
        self._slots = [DeviceSlot(slot) for slot in self._memory.split(layout.slot_bytes)]
        self._tensors: dict[int, Mapping[str, torch.Tensor]] = {}
        self._stacks = self._views(self._memory.view(num_slots, layout.slot_bytes))

    def slot(self, idx: int) -> DeviceSlot:
        """Return slot `idx`, to be written."""
        assert self._memory is not None, "the pool is closed"
        return self._slots[idx]

    def address(self, idx: int) -> int:
        """Return the device's address of slot `idx`."""
        return self.slot(idx).memory.data_ptr()

    def tensors(self, idx: int) -> Mapping[str, torch.Tensor]:
        """Return views over slot `idx`, name -> tensor; see `Pool.tensors`. A matrix in another format is its bytes."""
        cached = self._tensors.get(idx)
        if cached is not None:
            return cached
        return self._tensors.setdefault(idx, self._views(self.slot(idx).memory))

    def rows(self, experts: Sequence[int], slots: Sequence[int]) -> SlotRows | FormattedRows:
        """Return expert id -> the tensors of its slot. Kernels for stacks read all slots as one tensor."""
        slot_of = dict(zip(experts, slots, strict=True))
        if self._formats:
            return FormattedRows(slot_of, self._stacks, self._formats)
        return SlotRows({expert: self.tensors(slot) for expert, slot in slot_of.items()}, slot_of, self._stacks)

    def _views(self, memory: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return an expert's tensors in `memory[..., slot_bytes]`, by name: `[..., *shape]`, or `[..., nbytes]`."""
        with torch.inference_mode(False):
            return {
                spec.name: _view(memory[..., spec.offset_bytes : spec.end_bytes], spec) for spec in self.layout.tensors
            }

    def begin_read(self, slots: Sequence[int]) -> None:
        """Allow the calling thread's kernels to read these slots from now on."""
        queue = self._device.current()
        key, awaited = queue.key, set[Event]()  # experts that came together share an event
        for idx in slots:
            self._slots[idx].begin_read(queue, key, awaited)

    def end_read(self, slots: Sequence[int]) -> None:
        """Note that the calling thread has launched everything that reads these slots; see `Pool.end_read`."""
        if not slots:
            return
        queue = self._device.current()
        key, read = queue.key, queue.mark()
        for idx in slots:
            self._slots[idx].end_read(key, read)

    def poison(self) -> None:
        """Fill every slot with NaN, for tests."""
        assert self._memory is not None, "the pool is closed"
        self._memory.fill_(POISON_BYTE)

    def room_for(self, num_slots: int) -> torch.Tensor:
        """Allocate all slots anew, since kernels read a pool as one tensor; see `Pool.room_for`."""
        return self._device.allocate(num_slots * self.layout.slot_bytes)

    def resize(self, num_slots: int, kept: Mapping[int, int], room: torch.Tensor) -> None:
        """See `Pool.resize`."""
        assert self._memory is not None, "the pool is closed"
        slot_bytes = self.layout.slot_bytes
        slots = [DeviceSlot(slot) for slot in room.split(slot_bytes)]
        queue = self._device.current()
        key, awaited = queue.key, set[Event]()
        for slot in self._slots:  # also those that are not kept: their memory is freed
            slot.begin_read(queue, key, awaited)
        queue.mark().wait_on_host()
        for source, target in kept.items():
            slots[target].memory.copy_(self._slots[source].memory)
        queue.mark().wait_on_host()
        for slot in self._slots:
            slot.wait_for_reads()
        self._memory, self._slots, self._tensors = room, slots, {}
        self._stacks = self._views(room.view(num_slots, slot_bytes))
        self.num_slots, self.nbytes = num_slots, num_slots * slot_bytes

    def close(self) -> None:
        """Let the memory go as soon as the last view of it is gone, and no kernel reads it. Closing twice is allowed."""
        for slot in self._slots:  # the allocator only knows the queue in which memory was allocated
            slot.wait_for_reads()
        self._memory, self._tensors, self._stacks = None, {}, {}
        self._slots = []


def _view(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return memory if spec.format is not None else memory.view(spec.dtype).unflatten(-1, spec.shape)
