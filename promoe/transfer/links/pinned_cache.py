"""The link from disk to a device: experts that were read stay in pinned RAM until others need their place.

With experts on disk and slots on a device there are three tiers. The middle one has a fixed size, one buffer per
expert, and its own rule: the least recently used expert makes room, once no copy needs it. The scheduler knows nothing
of this tier; to it, this is one link.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict

import torch

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, Store
from promoe.transfer.devices import Device, Event
from promoe.transfer.links.base import Link
from promoe.transfer.links.device import DeviceLink
from promoe.transfer.links.disk import SPARE_RAM_BYTES
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.memory import HugePageRegion
from promoe.units import format_memory

logger = logging.getLogger(__name__)

# One buffer is read into while the other is copied.
FEWEST_PER_WORKER = 2
# Events kept for one expert. Its copies are made in order, so older ones are over, which is made sure of.
MOST_EVENTS = 16


class _Buffer:
    """Room for one expert, and which of its chunks are there.

    Args:
        memory: `[slot_bytes]` uint8, pinned.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.chunks: set[int] = set()  # those that are there, by their offset in the slot
        self.reading: set[int] = set()
        self.users = 0  # threads between `_fetch` and `_sent`
        self.copied: list[Event] = []  # copies of the expert that it holds
        self.before: list[Event] = []  # copies of the expert before it: nothing is written until these are over

    def vacate(self) -> None:
        """Forget the expert. Its copies may still be in flight."""
        assert not self.users, self.users
        self.chunks.clear()
        self.before, self.copied = [*self.before, *self.copied], []


class CachedLink(DeviceLink):
    """Copies what another link reads into pinned RAM. The least recently used expert makes room, once no copy needs it.

    Args:
        link: brings chunks into RAM, from as many threads as it has workers; closed with this link.
        store: what it reads.
        device: where experts are copied to.
        nbytes: of pinned RAM, at most. 0: the least with which each worker can read one expert while another is copied.

    Raises:
        ConfigError: that is too little to read and copy at the same time, or the system has not that much.
    """

    def __init__(self, link: Link, store: Store, device: Device, nbytes: int) -> None:
        super().__init__(device, link.workers)
        slot_bytes, fewest = _slot_bytes(store), FEWEST_PER_WORKER * link.workers
        if nbytes == 0:
            nbytes = fewest * slot_bytes
        if nbytes < fewest * slot_bytes:
            raise ConfigError(
                f"The 'pinned_bytes' of a PromoeConfig must be at least {fewest * slot_bytes} bytes here: {fewest} experts of "
                f"{format_memory(slot_bytes)}, {FEWEST_PER_WORKER} per worker. Got {nbytes} instead. 0 stands for this minimum."
            )
        self._num_experts = sum(store.num_experts)
        self._num_buffers = min(nbytes // slot_bytes, max(fewest, self._num_experts))
        self._link = link
        self._keys = {
            chunk.name: ExpertKey(layer_idx, expert_idx)
            for layer_idx, count in enumerate(store.num_experts)
            for expert_idx in range(count)
            for chunk in store.chunks(ExpertKey(layer_idx, expert_idx))
        }
        self.nbytes = self._num_buffers * slot_bytes
        """Bytes of pinned RAM."""
        memory = HugePageRegion(self.nbytes).tensor(0, (self._num_buffers, slot_bytes), torch.uint8)
        self._pinned = device.pin([memory], own_pages=True)
        if refused_bytes := self._pinned.refused_bytes:
            logger.warning(
                "%s of RAM for experts could not be pinned: they are copied to %s more slowly, and the host waits. Raise the "
                "limit of locked memory (ulimit -l), or choose a smaller 'pinned_bytes'.",
                format_memory(refused_bytes),
                device.name,
            )
        self._free = [_Buffer(row) for row in memory]
        self._held: OrderedDict[ExpertKey, _Buffer] = OrderedDict()  # least recently used first
        self._changed = threading.Condition()
        self._latest = threading.local()  # by worker: the buffer of what it fetched

    def _fetch(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk in RAM, and read it first if it is not there; see `DeviceLink._fetch`.

        If another worker is reading it, wait for that.
        """
        key, place = self._keys[chunk.name], chunk.slot_offset_bytes
        with self._changed:
            buffer = self._wait_for_buffer(key)
            buffer.users += 1
            while place in buffer.reading:
                self._changed.wait()
            missing = place not in buffer.chunks
            if missing:
                buffer.reading.add(place)
        if missing:
            self._read(chunk, buffer)
        self._latest.buffer = buffer
        return buffer.memory[place : place + chunk.nbytes]

    def _sent(self, copied: Event | None) -> None:
        """Keep the expert at least until then; see `DeviceLink._sent`."""
        with self._changed:
            buffer: _Buffer = self._latest.buffer
            if copied is not None:
                buffer.copied.append(copied)
            oldest = buffer.copied.pop(0) if len(buffer.copied) > MOST_EVENTS else None
            buffer.users -= 1
            self._changed.notify_all()
        if oldest is not None:
            oldest.wait_on_host()

    def describe(self) -> str:
        """Return one line for reports: "..., kept in 4.0 GiB of pinned RAM (240 of 1440 experts) to NVIDIA H100, ..."."""
        kept = f"{min(self._num_buffers, self._num_experts)} of {self._num_experts} experts"
        return (
            f"{self._link.describe()}, kept in {format_memory(self.nbytes)} of pinned RAM ({kept}) {super().describe()}"
        )

    def close(self) -> None:
        """Refuse further transfers, close the other link and give back the RAM."""
        super().close()
        with self._changed:  # those who wait for a buffer see that the link is closed
            self._changed.notify_all()
        self._link.close()
        self._held.clear()
        self._free.clear()
        self._pinned.undo()

    def _wait_for_buffer(self, key: ExpertKey) -> _Buffer:
        """Return the expert's buffer, or if it has none a free one or that of another expert, with the lock held.

        There is one for each worker soon: there are more buffers than workers, and each worker uses one at a time.
        """
        while not self._closed:
            buffer = self._held.pop(key, None) or self._vacant()
            if buffer is not None:
                self._held[key] = buffer
                return buffer
            self._changed.wait()
        raise OSError(errno.EBADF, "The link is closed")

    def _vacant(self) -> _Buffer | None:
        if self._free:
            return self._free.pop()
        for key, buffer in self._held.items():
            if not buffer.users:
                del self._held[key]
                buffer.vacate()
                return buffer
        return None

    def _read(self, chunk: Chunk, buffer: _Buffer) -> None:
        place, arrived = chunk.slot_offset_bytes, False
        try:
            _wait_for_all(buffer.before)
            self._link.transfer(chunk, buffer.memory.numpy().data, buffer.memory.data_ptr())
            arrived = True
        finally:
            with self._changed:
                buffer.reading.discard(place)
                if arrived:
                    buffer.chunks.add(place)
                    buffer.before = []
                else:
                    buffer.users -= 1
                self._changed.notify_all()


def bytes_for_all_that_fits(store: Store, workers: int) -> int:
    """Return pinned RAM for as many experts as fit into free RAM with 2 GiB to spare, or 0 where that is too little."""
    free_bytes = free_ram_bytes() or 0
    slot_bytes = _slot_bytes(store)
    nbytes = min(free_bytes - SPARE_RAM_BYTES, sum(store.num_experts) * slot_bytes)
    return nbytes if nbytes >= FEWEST_PER_WORKER * workers * slot_bytes else 0


def _slot_bytes(store: Store) -> int:
    """Return the bytes of the largest slot, for a buffer takes an expert of any layer."""
    assert store.hot is None, "mixed experts are not served on devices"
    return max(layout.slot_bytes for layout in store.layouts)


def _wait_for_all(events: list[Event]) -> None:
    for event in tuple(events):
        event.wait_on_host()
