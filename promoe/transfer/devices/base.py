"""What a device beside the processor is: memory that copies fill while the host does other things.

Work is put into queues (CUDA's streams) and done in their order, some time later. An event marks a place in a queue:
another queue, or the host, can wait until everything before it is done. All that promoe's correctness on a device rests
on is said in these terms, so that it can be tested without a device.

The tests' device runs its queues as late and in as odd an order as these terms allow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from promoe.errors import ConfigError

# CUDA's driver copies up to 64 KiB of ordinary memory before it returns. This leaves a margin.
COPIED_AT_ONCE_BYTES = 16 * 1024


class Event(Protocol):
    """A place in a queue."""

    def wait_on_host(self) -> None:
        """Return when everything before it is done."""
        ...


class Queue(Protocol):
    """Work in order."""

    @property
    def key(self) -> Hashable:
        """Equal for two objects that stand for the same queue."""
        ...

    def mark(self) -> Event:
        """Return the place after everything that was put into the queue so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let everything that is put into the queue from now on begin after `event`. Returns at once."""
        ...

    def wait_on_host(self) -> None:
        """Return as soon as everything that was put into the queue so far is done. A core spins meanwhile."""
        ...

    def running(self) -> AbstractContextManager[object]:
        """Send the calling thread's kernels to this queue while the context lasts."""
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
        refused_bytes: bytes that could not be pinned.
        undo: unpins. Safe to repeat.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], refused_bytes: int, undo: Callable[[], None]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [start for start, _ in self._ranges]
        self.refused_bytes = refused_bytes
        self.undo = undo

    def covers(self, memory: torch.Tensor) -> bool:
        """Return whether all of a contiguous tensor's memory is pinned."""
        address = memory.data_ptr()
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address + memory.nbytes <= self._ranges[place][1]


class Device(Protocol):
    """One device."""

    torch_device: torch.device
    """Where its tensors are."""

    @property
    def name(self) -> str:
        """Its name for reports, such as "NVIDIA H100"."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes of memory that are free now."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return `[nbytes]` uint8 on the device, aligned to at least 256 bytes.

        Raises:
            ConfigError: the device has not that much memory.
        """
        ...

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Return `[nbytes]` uint8 in pinned host memory, for use inside and outside of inference mode."""
        ...

    def current(self) -> Queue:
        """Return the queue of the calling thread's kernels. This thread is to use it at once."""
        ...

    def new_queue(self) -> Queue:
        """Return another queue, for copies."""
        ...

    def side_queue(self) -> Queue:
        """Return another queue, for kernels: the same each time, since libraries keep memory for each queue."""
        ...

    def pin(self, tensors: Sequence[torch.Tensor], own_pages: bool = False) -> Pinned:
        """Pin the host memory of tensors where it lies, as far as that does no harm to others.

        Args:
            tensors: their storages are pinned.
            own_pages: nothing else lies in their pages.
        """
        ...


def open_device(device: str | torch.device) -> Device | None:
    """Return the device of a name, or None for the processor.

    Raises:
        ConfigError: there is no such device, or slots cannot be on it.
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'The \'device\' argument must be "cpu" or "cuda". Got {device!r} instead.') from error
    if kind == "cpu":
        return None
    if kind != "cuda":
        raise ConfigError(f'The \'device\' argument must be "cpu" or "cuda". Got {str(device)!r} instead.')
    from promoe.transfer.devices.cuda import CudaDevice

    return CudaDevice(device)


def send(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a few integers in host memory as a tensor on `device`, in the order of the calling thread's kernels.

    Returns at once: the driver copies a small tensor right away, and a larger one goes through pinned memory, which
    torch keeps until the copy is made.
    """
    on_host = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return on_host
    if on_host.nbytes > COPIED_AT_ONCE_BYTES:
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
