"""Slots on a device, and who may read or overwrite one when.

A copy into a slot waits for the kernels that read what was there; a kernel that reads it waits for the copies. Both waits are
put into queues: the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from promoe.errors import ConfigError
from promoe.transfer.devices import Device, Event, Queue
from promoe.transfer.memory import POISON_BYTE, SLOT_ALIGNMENT_BYTES
from promoe.transfer.rows import SlotRows

if TYPE_CHECKING:
    from promoe.stores.layout import ExpertLayout


class DeviceSlot:
    """The bytes of one slot. While it is written nobody reads it, and the other way round: the scheduler sees to that.

    Args:
        memory: `[slot_bytes]` uint8 on the device.
    """

    __slots__ = ("_arrived", "_awaited", "_reads", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._arrived: Event | None = None
        self._awaited: set[Hashable] = set()  # queues that wait for it already
        self._reads: dict[Hashable, Event] = {}  # by queue, after its latest read

    def begin_write(self, queue: Queue, awaited: set[Event]) -> None:
        """What `queue` is given from now on may overwrite the slot. It waits for events in `awaited` already."""
        for read in self._reads.values():
            if read not in awaited:
                queue.wait(read)
                awaited.add(read)
        self._reads.clear()

    def end_write(self, arrived: Event) -> None:
        """All writes that were put into a queue are before `arrived`."""
        self._arrived = arrived
        self._awaited.clear()

    def begin_read(self, queue: Queue, key: Hashable, awaited: set[Event]) -> None:
        """What `queue` (of this `key`) is given from now on may read what was written. It waits for events in `awaited`
        already."""
        arrived = self._arrived
        if arrived is None or key in self._awaited:
            return
        if arrived not in awaited:
            queue.wait(arrived)
            awaited.add(arrived)
        self._awaited.add(key)

    def end_read(self, key: Hashable, read: Event) -> None:
        """All reads that were put into the queue of this `key` are before `read`."""
        self._reads[key] = read

    def wait_for_reads(self) -> None:
        """Return when no kernel reads it any more."""
        for read in self._reads.values():
            read.wait_on_host()


class DevicePool:
    """A pool of `num_slots` slots of one layout on a device; as `SlotPool` is in RAM.

    Args:
        layout: how one expert lies in a slot.
        num_slots: at least 1.
        device: where.

    Raises:
        ConfigError: no slots, or the device has no memory for them.
    """

    def __init__(self, layout: ExpertLayout, num_slots: int, device: Device) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"A slot pool needs at least 1 slot ({layout.slot_bytes} bytes). Got {num_slots} instead."
            )
        assert layout.slot_bytes % SLOT_ALIGNMENT_BYTES == 0, layout.slot_bytes
        self.layout = layout
        self.num_slots = num_slots
        assert not layout.formats, "kernels of a device read plain tensors"
        self.nbytes = num_slots * layout.slot_bytes
        self._device = device
        self._memory: torch.Tensor | None = device.allocate(self.nbytes)
        self._slots = [DeviceSlot(slot) for slot in self._memory.split(layout.slot_bytes)]
        self._tensors: dict[int, Mapping[str, torch.Tensor]] = {}
        self._stacks = self._views(self._memory.view(num_slots, layout.slot_bytes))

    def slot(self, idx: int) -> DeviceSlot:
        """Slot `idx`, to be written."""
        assert self._memory is not None, "the pool is closed"
        return self._slots[idx]

    def address(self, idx: int) -> int:
        """The device's address of slot `idx`."""
        return self.slot(idx).memory.data_ptr()

    def tensors(self, idx: int) -> Mapping[str, torch.Tensor]:
        """Views over slot `idx`, name -> tensor; the same objects each time. To be read between `begin_read` and `end_read`."""
        cached = self._tensors.get(idx)
        if cached is not None:
            return cached
        return self._tensors.setdefault(idx, self._views(self.slot(idx).memory))

    def rows(self, experts: Sequence[int], slots: Sequence[int]) -> SlotRows:
        """Expert id -> the tensors of the slot that it is in; kernels for stacks read the slots as one."""
        slot_of = dict(zip(experts, slots, strict=True))
        return SlotRows({expert: self.tensors(slot) for expert, slot in slot_of.items()}, slot_of, self._stacks)

    def _views(self, memory: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """An expert's tensors in `memory[..., slot_bytes]`, by name: `[..., *shape]`."""
        with torch.inference_mode(False):
            return {
                spec.name: memory[..., spec.offset_bytes : spec.end_bytes].view(spec.dtype).unflatten(-1, spec.shape)
                for spec in self.layout.tensors
            }

    def begin_read(self, slots: Sequence[int]) -> None:
        """The calling thread's kernels may read these slots from now on."""
        queue = self._device.current()
        key, awaited = queue.key, set[Event]()  # experts that came together share an event
        for idx in slots:
            self._slots[idx].begin_read(queue, key, awaited)

    def end_read(self, slots: Sequence[int]) -> None:
        """The calling thread has launched all that reads these slots; to be said before they are given back."""
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
        """See `Pool.room_for`. Old and new slots are there at once for a moment: kernels read all of a pool as one tensor."""
        return self._device.allocate(num_slots * self.layout.slot_bytes)

    def resize(self, num_slots: int, kept: Mapping[int, int], room: torch.Tensor) -> None:
        """See `Pool.resize`."""
        assert self._memory is not None, "the pool is closed"
        slot_bytes = self.layout.slot_bytes
        slots = [DeviceSlot(slot) for slot in room.split(slot_bytes)]
        queue = self._device.current()
        key, awaited = queue.key, set[Event]()
        for slot in self._slots:  # also those that are not kept: their memory goes
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
        for slot in self._slots:  # the allocator knows nothing of other queues than the one that it was asked in
            slot.wait_for_reads()
        self._memory, self._tensors, self._stacks = None, {}, {}
        self._slots = []
