"""The link from RAM to a device: tensors are pinned where they lie, or go through pinned buffers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from promoe.stores.base import Chunk, Store
from promoe.transfer.devices import Device, Event
from promoe.transfer.links.device import DeviceLink
from promoe.units import format_memory

logger = logging.getLogger(__name__)

BUFFERS_PER_THREAD = 2


class PinnedLink(DeviceLink):
    """Copies from a store in RAM that it pins in place. What cannot be pinned goes through buffers, copied by the host.

    Args:
        store: of the model's own tensors; the caller closes it.
        device: where the slots are.
    """

    def __init__(self, store: Store, device: Device) -> None:
        super().__init__(device, workers=1)  # one thread keeps two copies in flight
        self._store = store
        self._pinned = device.pin(store.tensors)
        self.queues = all(map(self._pinned.covers, store.tensors))
        longest = max(max(store.chunk_bytes(layer_idx)) for layer_idx in range(len(store.num_experts)))
        self._buffers = _Buffers(device.allocate_pinned, longest)
        if refused_bytes := self._pinned.refused_bytes:
            logger.warning(
                "%s of the experts could not be pinned: each goes to %s through a buffer, which takes the host time. Raise the "
                "limit of locked memory (ulimit -l) or free some RAM.",
                format_memory(refused_bytes),
                device.name,
            )

    def _fetch(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk where it lies, or in a buffer; see `DeviceLink._fetch`."""
        tensor = self._store.tensor(chunk)
        if self._pinned.covers(tensor):
            return tensor
        memory = self._buffers.next()[: chunk.nbytes]
        self._store.read(chunk, memory.numpy().data)
        return memory

    def _sent(self, copied: Event | None) -> None:
        """Let the buffer, if there was one, be written again after that; see `DeviceLink._sent`."""
        self._buffers.sent(copied)

    def describe(self) -> str:
        """Return one line for reports, such as "pinned memory to NVIDIA H100, 2 copies in flight"."""
        refused_bytes = self._pinned.refused_bytes
        through_buffers = f" ({format_memory(refused_bytes)} through buffers)" if refused_bytes else ""
        return f"pinned memory{through_buffers} {super().describe()}"

    def close(self) -> None:
        """Refuse further transfers, and unpin the model's tensors."""
        super().close()
        self._pinned.undo()


class _Buffers(threading.local):
    """Pinned buffers of one chunk, two per thread that needs them: one is written while the other is copied."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], nbytes: int) -> None:
        self._allocate, self._nbytes = allocate, nbytes
        self._given: torch.Tensor | None = None
        self._copied: deque[tuple[torch.Tensor, Event | None]] = deque()  # each with its last copy, oldest first

    def next(self) -> torch.Tensor:
        """Return the buffer that was not used last, once its copy is over. It is the caller's until `sent`."""
        if self._given is None:  # else what it was given for failed
            if not self._copied:
                self._copied.extend((self._allocate(self._nbytes), None) for _ in range(BUFFERS_PER_THREAD))
            self._given, copied = self._copied.popleft()
            if copied is not None:
                copied.wait_on_host()
        return self._given

    def sent(self, copied: Event | None) -> None:
        """Say when the copy out of what `next` gave, if anything, is over; None if there is no copy."""
        if self._given is not None:
            self._copied.append((self._given, copied))
            self._given = None
