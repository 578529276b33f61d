"""Host to device: chunks copied from pinned memory by the device's copy engine, two in flight at a time."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from promoe.stores.base import Chunk
from promoe.transfer.device_pool import DeviceSlot
from promoe.transfer.devices import Device, Event
from promoe.transfer.link_timetable import IN_FLIGHT


class Source(Protocol):
    """Where a device link takes bytes from: host memory, pinned if copies are to go on beside the host."""

    at_hand: bool
    """Whether `fetch` neither reads, copies nor waits, whatever is asked for."""

    def fetch(self, chunk: Chunk) -> torch.Tensor:
        """The chunk as its slot is to have it, `[nbytes]` uint8 in host memory, valid until `sent` was called for it.

        Raises:
            OSError: it cannot be had.
        """
        ...

    def sent(self, copied: Event | None) -> None:
        """The copy of what this thread fetched last will have been made at `copied`; None: it will not be."""
        ...

    def describe(self) -> str:
        """For reports: "pinned memory"."""
        ...

    def close(self) -> None:
        """Give back memory and files; nothing is fetched any more, and all copies were made."""
        ...


class DeviceLink:
    """Copies chunks to slots on a device. A transfer is over when its copy is in the device's queue.

    So an expert counts as arrived a little before it has: kernels that read it are told to wait for it, and the next
    `transfer` waits, on the host, until no more than two copies are in flight, so that what is more urgent never waits for
    more than these. That is what `transfer_all` is for: it waits for nothing.

    Args:
        source: where bytes come from.
        device: where the slots are.
        workers: threads that fetch and copy.
    """

    copies_from_ram = False

    def __init__(self, source: Source, device: Device, workers: int = 1) -> None:
        self.workers = workers
        self._source = source
        self._device = device
        self.queues = source.at_hand
        self._queue = device.new_queue()
        self._turn = threading.Lock()  # of who waits for those in flight
        self._lock = threading.Lock()
        self._in_flight: deque[Event] = deque(maxlen=IN_FLIGHT)  # what was put in last: copies are made in order
        self._closed = False

    def transfer(self, chunk: Chunk, destination: DeviceSlot, address: int) -> None:
        """Put one chunk's copy into the queue; see `Link.transfer`."""
        fetched = self._source.fetch(chunk)
        copied = None
        try:
            with self._turn:
                self._wait_for_one()
                copied = self._put([(chunk, destination, fetched)])
        finally:
            self._source.sent(copied)

    def transfer_all(self, transfers: Sequence[tuple[Chunk, DeviceSlot]]) -> None:
        """See `QueueingLink`; not unless it `queues`."""
        assert self.queues
        self._put([(chunk, destination, self._source.fetch(chunk)) for chunk, destination in transfers])

    def _wait_for_one(self) -> None:
        """Return when fewer than `IN_FLIGHT` are."""
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
        """One line for reports: "pinned memory to NVIDIA H100, 2 copies in flight"."""
        return f"{self._source.describe()} to {self._device.name}, {IN_FLIGHT} copies in flight"

    def close(self) -> None:
        """Refuse further transfers, and give back the host's memory once the copies in flight were made."""
        with self._lock:
            self._closed = True
            while self._in_flight:
                self._in_flight.popleft().wait_on_host()
        self._source.close()


def _place(chunk: Chunk, slot: DeviceSlot) -> torch.Tensor:
    start = chunk.slot_offset_bytes
    return slot.memory[start : start + chunk.nbytes]
