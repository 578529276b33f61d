"""What a device beside the processor is: memory that is filled by copies which go on while the host does other things.

Work is put into queues (CUDA's streams) and done in their order, some time later. An event marks a place in a queue: another
queue, or the host, can wait until everything before it was done. All that promoe's correctness on a device rests on is said
in terms of these, so that it can be tested where there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a queue."""

    def wait_on_host(self) -> None:
        """Return when everything before it was done."""
        ...


class Queue(Protocol):
    """Work in order."""

    @property
    def key(self) -> Hashable:
        """Equal for what is the same queue."""
        ...

    def mark(self) -> Event:
        """The place after all that was put into it so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is put into it from now on begins after `event`. Returns at once."""
        ...

    def wait_on_host(self) -> None:
        """Return as soon as all that was put into it so far was done, at the cost of a core that spins."""
        ...

    def running(self) -> AbstractContextManager[object]:
        """Meanwhile the calling thread's kernels go there."""
        ...

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put in copies of bytes, (to the device, from host memory). Returns at once where the latter is pinned."""
        ...

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put in a copy of a tensor on the device to one in pinned memory. Returns at once."""
        ...


class Pinned:
    """Host memory that copies to a device are made from directly, as ranges of addresses.

    Args:
        ranges: [start, end), disjoint.
        refused_bytes: of what was to be pinned and could not be.
        undo: unpins. Safe to repeat.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], refused_bytes: int, undo: Callable[[], None]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [start for start, _ in self._ranges]
        self.refused_bytes = refused_bytes
        self.undo = undo

    def covers(self, memory: torch.Tensor) -> bool:
        """Whether all of a contiguous tensor's memory is."""
        address = memory.data_ptr()
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address + memory.nbytes <= self._ranges[place][1]


class Device(Protocol):
    """One device."""

    torch_device: torch.device
    """Where its tensors are."""

    @property
    def name(self) -> str:
        """For reports: "NVIDIA H100"."""
        ...

    def free_bytes(self) -> int:
        """Memory that is free now."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`[nbytes]` uint8 on the device, aligned to at least 256 bytes.

        Raises:
            ConfigError: there is not so much.
        """
        ...

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """`[nbytes]` uint8 in host memory that copies need not be staged from; for use in inference mode and out of it."""
        ...

    def current(self) -> Queue:
        """Where the calling thread's kernels go; to be used at once, by this thread."""
        ...

    def new_queue(self) -> Queue:
        """One beside that, for copies."""
        ...

    def side_queue(self) -> Queue:
        """One beside both, for kernels; the same each time: libraries keep memory for each queue that they have worked in."""
        ...

    def pin(self, tensors: Sequence[torch.Tensor], own_pages: bool = False) -> Pinned:
        """Pin the host memory of tensors where it lies, as far as that does no harm to others.

        Args:
            tensors: whose storages are pinned.
            own_pages: nothing else lies in the pages that they are in.
        """
        ...
