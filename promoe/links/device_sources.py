"""Where a device link takes bytes from: the model's tensors in RAM, pinned where they lie, or files through pinned buffers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from promoe.devices import Device, Event
from promoe.links.base import Link
from promoe.stores import HostStore
from promoe.stores.base import Chunk
from promoe.units import format_memory

logger = logging.getLogger(__name__)

BUFFERS_PER_THREAD = 2


class PinnedSource:
    """A store in RAM, pinned in place. What cannot be pinned is copied all the same, more slowly, with one warning.

    Args:
        store: of the model's own tensors.
        device: that they are copied to.
    """

    def __init__(self, store: HostStore, device: Device) -> None:
        self._store = store
        self._refused_bytes, self._unpin = device.pin(store.tensors)
        if self._refused_bytes:
            logger.warning(
                "%s of the experts could not be pinned: they are copied to %s more slowly, and the host waits. Raise the "
                "limit of locked memory (ulimit -l) or free some RAM.",
                format_memory(self._refused_bytes),
                device.name,
            )

    def fetch(self, chunk: Chunk) -> torch.Tensor:
        """The chunk where it lies."""
        return self._store.tensor(chunk)

    def sent(self, copied: Event) -> None:
        """The tensors stay where they are."""

    def describe(self) -> str:
        """Says so if not everything is pinned."""
        refused = f" ({format_memory(self._refused_bytes)} pageable)" if self._refused_bytes else ""
        return f"pinned memory{refused}"

    def close(self) -> None:
        """Unpin. The tensors are the model's."""
        self._unpin()


class _Buffer:
    """Pinned memory for one slot, and the copy out of it that has to be over before it is written again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Event | None = None


class _Buffers(threading.local):
    """Two buffers per thread: one is read into while the other is copied."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], nbytes: int) -> None:
        self._buffers = [_Buffer(allocate(nbytes)) for _ in range(BUFFERS_PER_THREAD)]

    def next(self) -> _Buffer:
        """The one that was not used last, once it is free."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.copied is not None:
            buffer.copied.wait_on_host()
            buffer.copied = None
        return buffer

    @property
    def latest(self) -> _Buffer:
        """The one that `next` gave last."""
        return self._buffers[0]


class StagedSource:
    """Whatever a link brings into RAM, such as files: each worker reads into pinned buffers of its own.

    Args:
        link: brings chunks into RAM; closed with this source.
        device: that the buffers are copied to.
        slot_bytes: of the largest slot: a link writes a chunk where it would be in one.
    """

    def __init__(self, link: Link, device: Device, slot_bytes: int) -> None:
        self._link = link
        self._buffers = _Buffers(device.allocate_pinned, slot_bytes)

    def fetch(self, chunk: Chunk) -> torch.Tensor:
        """Read it into a buffer that no copy needs any more."""
        memory = self._buffers.next().memory
        self._link.transfer(chunk, memory.numpy().data, memory.data_ptr())
        return memory[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes]

    def sent(self, copied: Event) -> None:
        """The buffer may be written again after that."""
        self._buffers.latest.copied = copied

    def describe(self) -> str:
        """The link's description."""
        return f"{self._link.describe()}, through pinned buffers"

    def close(self) -> None:
        """Close the link."""
        self._link.close()
