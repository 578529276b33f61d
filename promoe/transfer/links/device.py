"""Links from host memory to a device, whose copy engine copies chunks, two at a time.

Kernels wait for the copies that they read, and copies for the kernels that read what was in the slot before; the host
waits for neither. If all experts are pinned, a forward queues the copies that it needs itself, as soon as its gate has
chosen, as one batch with one event. To wake a worker would take longer, and two threads that want the interpreter take
it from each other. Workers bring what is speculative, and only while few copies are in flight, so that urgent copies
never stand behind more.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Sequence

import torch

from promoe.stores.base import Chunk
from promoe.transfer.device_pool import DeviceSlot
from promoe.transfer.devices import Device, Event
from promoe.transfer.link_timetable import IN_FLIGHT
from promoe.transfer.links.base import Link


class DeviceLink(Link):
    """Copies chunks to slots on a device. A transfer is over when its copy is in the device's queue.

    So an expert counts as arrived a little before it has: kernels that read it are told to wait for it. `transfer`
    waits on the host until fewer than two copies are in flight, so that something more urgent never waits for more than
    these. What is urgent goes by `transfer_all`, which does not wait.

    Subclasses know where the bytes are: `_fetch`, `_sent`. Host memory is pinned if the host is not to wait for copies.

    Args:
        device: where the slots are.
        workers: threads that fetch and copy.
    """

    def __init__(self, device: Device, workers: int) -> None:
        self.workers = workers
        self._device = device
        self._queue = device.new_queue()
        self._turn = threading.Lock()  # one thread at a time waits for the copies in flight
        self._lock = threading.Lock()
        self._in_flight: deque[Event] = deque(maxlen=IN_FLIGHT)  # the latest events: copies are made in order
        self._closed = False

    def _fetch(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk as its slot is to have it, `[nbytes]` uint8 in host memory, valid until `_sent` is called.

        If the link `queues`, this never reads, copies or waits.

        Raises:
            OSError: the bytes could not be read.
        """
        raise NotImplementedError

    def _sent(self, copied: Event | None) -> None:
        """Note that the copy of what this thread fetched last is over at `copied`; None if it will not be made."""
        raise NotImplementedError

    def transfer(self, chunk: Chunk, destination: DeviceSlot, address: int) -> None:
        """Queue one chunk's copy; see `Link.transfer`."""
        fetched = self._fetch(chunk)
        copied = None
        try:
            with self._turn:
                self._wait_for_one()
                copied = self._put([(chunk, destination, fetched)])
        finally:
            self._sent(copied)

    def transfer_all(self, transfers: Sequence[tuple[Chunk, DeviceSlot]]) -> None:
        """Queue the copies of several chunks as one batch; see `Link.transfer_all`."""
        assert self.queues
        self._put([(chunk, destination, self._fetch(chunk)) for chunk, destination in transfers])

    def _wait_for_one(self) -> None:
        """Return when fewer than `IN_FLIGHT` copies are in flight."""
        with self._lock:
            oldest = self._in_flight[0] if len(self._in_flight) == IN_FLIGHT else None
        if oldest is not None:
            oldest.wait_on_host()

    def _put(self, copies: Sequence[tuple[Chunk, DeviceSlot, torch.Tensor]]) -> Event:
        queue = self._queue
        with self._lock:  # one queue, in order
            if self._closed:
                raise OSError(errno.EBADF, "The link is closed")
            awaited: set[Event] = set()
            for _, destination, _ in copies:
                destination.begin_write(queue, awaited)
            queue.copy_all([(_place(chunk, slot), fetched) for chunk, slot, fetched in copies])
            copied = queue.mark()
            for _, destination, _ in copies:
                destination.end_write(copied)
            self._in_flight.append(copied)
            return copied

    def describe(self) -> str:
        """Return the end of the line for reports: "to NVIDIA H100, 2 copies in flight"."""
        return f"to {self._device.name}, {IN_FLIGHT} copies in flight"

    def close(self) -> None:
        """Refuse further transfers, and return once the copies in flight are over."""
        with self._lock:
            self._closed = True
            while self._in_flight:
                self._in_flight.popleft().wait_on_host()


def _place(chunk: Chunk, slot: DeviceSlot) -> torch.Tensor:
    """Return the bytes of a slot that a chunk fills."""
    start = chunk.slot_offset_bytes
    return slot.memory[start : start + chunk.nbytes]
