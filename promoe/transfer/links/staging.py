"""Buffers for bytes that cannot be read straight into their slot, and what happens between buffer and slot."""

from __future__ import annotations

import ctypes
import threading

from promoe.stores.base import Chunk, Store, convert_chunk
from promoe.transfer.memory import HugePageRegion

GROWTH_BYTES = 64 * 1024


class Staging(threading.local):
    """One reusable huge-page buffer per thread. It grows to the largest request, and is freed with its thread."""

    def __init__(self) -> None:
        self._region: HugePageRegion | None = None

    def region(self, nbytes: int) -> HugePageRegion:
        """Return the calling thread's buffer, at least `nbytes` long. Its contents are lost at the thread's next call."""
        if self._region is None or self._region.nbytes < nbytes:
            self._region = None  # free the old one first
            self._region = HugePageRegion(-(-nbytes // GROWTH_BYTES) * GROWTH_BYTES)
        return self._region


def read_into_slot(store: Store, chunk: Chunk, destination: memoryview, staging: Staging) -> None:
    """Read a chunk by the store's own `read`: straight into the slot, or through a buffer if it is converted.

    Args:
        store: where the chunk is.
        chunk: what to read.
        destination: the whole slot.
        staging: buffers.

    Raises:
        OSError: the store cannot read it.
    """
    if chunk.dtype is None:
        end_bytes = chunk.slot_offset_bytes + chunk.nbytes
        store.read(chunk, destination[chunk.slot_offset_bytes : end_bytes])
        return
    region = staging.region(chunk.source_nbytes)
    store.read(chunk, region.memory[: chunk.source_nbytes])
    convert_into_slot(chunk, region, 0, destination)


def convert_into_slot(chunk: Chunk, region: HugePageRegion, offset_bytes: int, destination: memoryview) -> None:
    """Convert a chunk's source bytes into their place in the slot. Rounds as `tensor.to(chunk.dtype)` does.

    Args:
        chunk: what was read.
        region: holds its source bytes from `offset_bytes` on; written over where they are not aligned.
        offset_bytes: any byte.
        destination: the whole slot.
    """
    if chunk.source_dtype is not None and offset_bytes % chunk.source_dtype.itemsize:
        # A file may hold a tensor at any byte, but torch wants aligned elements.
        ctypes.memmove(region.address, region.address + offset_bytes, chunk.source_nbytes)
        offset_bytes = 0
    source = region.memory[offset_bytes : offset_bytes + chunk.source_nbytes]
    convert_chunk(chunk, source, destination[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes])
