"""Where a device link takes bytes from: tensors in RAM, pinned where they lie, or anything through pinned buffers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from promoe.stores.base import Chunk, Store
from promoe.transfer.devices import Device, Event
from promoe.transfer.links.base import Link
from promoe.units import format_memory

logger = logging.getLogger(__name__)

BUFFERS_PER_THREAD = 2


class PinnedSource:
    """A store in RAM, pinned in place. What is not is copied into pinned buffers first, which takes the host time.

    Args:
        store: of the model's own tensors.
        device: that they are copied to.
    """

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._pinned = device.pin(store.tensors)
        self.at_hand = all(map(self._pinned.covers, store.tensors))
        longest = max(max(store.chunk_bytes(layer_idx)) for layer_idx in range(len(store.num_experts)))
        self._buffers = _Buffers(device.allocate_pinned, longest)
        if refused_bytes := self._pinned.refused_bytes:
            logger.warning(
                "%s of the experts could not be pinned: each goes to %s through a buffer, which takes the host time. Raise the "
                "limit of locked memory (ulimit -l) or free some RAM.",
                format_memory(refused_bytes),
                device.name,
            )

    def fetch(self, chunk: Chunk) -> torch.Tensor:
        """The chunk where it lies, or in a buffer."""
        tensor = self._store.tensor(chunk)
        if self._pinned.covers(tensor):
            return tensor
        memory = self._buffers.next().memory[: chunk.nbytes]
        self._store.read(chunk, memory.numpy().data)
        return memory

    def sent(self, copied: Event | None) -> None:
        """The buffer, if there was one, may be written again after that."""
        self._buffers.sent(copied)

    def describe(self) -> str:
        """Says so if not everything could be pinned."""
        refused_bytes = self._pinned.refused_bytes
        return f"pinned memory{f' ({format_memory(refused_bytes)} through buffers)' if refused_bytes else ''}"

    def close(self) -> None:
        """Unpin. The tensors are the model's."""
        self._pinned.undo()


class _Buffer:
    """Pinned memory for one chunk in its slot, and the copy out of it that has to be over before it is written again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Event | None = None


class _Buffers(threading.local):
    """Two buffers per thread that needs them: one is read into while the other is copied."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], nbytes: int) -> None:
        self._allocate, self._nbytes = allocate, nbytes
        self._buffers: list[_Buffer] = []
        self._given: _Buffer | None = None

    def next(self) -> _Buffer:
        """The one that was not used last, once it is free; until `sent`."""
        if not self._buffers:
            self._buffers = [_Buffer(self._allocate(self._nbytes)) for _ in range(BUFFERS_PER_THREAD)]
        self._buffers.reverse()
        buffer = self._given = self._buffers[0]
        if buffer.copied is not None:
            buffer.copied.wait_on_host()
            buffer.copied = None
        return buffer

    def sent(self, copied: Event | None) -> None:
        """What `next` gave, if anything, is copied, or (None) will not be."""
        if self._given is not None:
            self._given.copied, self._given = copied, None


class StagedSource:
    """Whatever a link brings into RAM, such as files: each worker reads into pinned buffers of its own.

    Args:
        link: brings chunks into RAM; closed with this source.
        device: that the buffers are copied to.
        slot_bytes: of the largest slot: a link writes a chunk where it would be in one.
    """

    at_hand = False

    def __init__(self, link: Link, device: Device, slot_bytes: int) -> None:
        self._link = link
        self._buffers = _Buffers(device.allocate_pinned, slot_bytes)

    def fetch(self, chunk: Chunk) -> torch.Tensor:
        """Read it into a buffer that no copy needs any more."""
        memory = self._buffers.next().memory
        self._link.transfer(chunk, memory.numpy().data, memory.data_ptr())
        return memory[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes]

    def sent(self, copied: Event | None) -> None:
        """The buffer may be written again after that."""
        self._buffers.sent(copied)

    def describe(self) -> str:
        """The link's description."""
        return f"{self._link.describe()}, through pinned buffers"

    def close(self) -> None:
        """Close the link."""
        self._link.close()
