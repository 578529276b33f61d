"""The way through a buffer: bytes that cannot be read straight into their slot are staged per thread, then moved on."""

from __future__ import annotations

import ctypes
import threading

import torch

from promoe.stores.base import Chunk, Store, compute_chunk
from promoe.transfer.memory import HugePageRegion

GROWTH_BYTES = 64 * 1024
# Up to this many elements torch copies in the calling thread. Beyond, each link worker would start OpenMP threads of
# its own, which compete with the compute threads for their cores.
SERIAL_COPY_ELEMENTS = 32768


class Staging(threading.local):
    """One reusable huge-page buffer per thread; grows to the largest request, freed with its thread."""

    def __init__(self) -> None:
        self._region: HugePageRegion | None = None

    def region(self, nbytes: int) -> HugePageRegion:
        """The calling thread's buffer, at least `nbytes` long. Its contents are lost at the thread's next call."""
        if self._region is None or self._region.nbytes < nbytes:
            self._region = None  # free the old one first
            self._region = HugePageRegion(-(-nbytes // GROWTH_BYTES) * GROWTH_BYTES)
        return self._region


def read_into_slot(store: Store, chunk: Chunk, destination: memoryview, staging: Staging) -> None:
    """Read a chunk by the store's own `read`: straight into the slot, or through staging when it is converted.

    `destination` is the whole slot. Raises what the store raises (OSError).
    """
    if chunk.dtype is None:
        end_bytes = chunk.slot_offset_bytes + chunk.nbytes
        store.read(chunk, destination[chunk.slot_offset_bytes : end_bytes])
        return
    region = staging.region(chunk.source_nbytes)
    store.read(chunk, region.memory[: chunk.source_nbytes])
    convert_into_slot(chunk, region, 0, destination)


def convert_into_slot(chunk: Chunk, region: HugePageRegion, offset_bytes: int, destination: memoryview) -> None:
    """Convert the chunk's source elements, which lie in `region` from `offset_bytes` on, into their place in the slot.

    The same rounding as `tensor.to(chunk.dtype)`.
    """
    if chunk.compute is not None:
        source = region.memory[offset_bytes : offset_bytes + chunk.source_nbytes]
        compute_chunk(chunk, source, destination[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes])
        return
    assert chunk.source_dtype is not None, chunk
    assert chunk.dtype is not None, chunk
    count = chunk.nbytes // chunk.dtype.itemsize
    assert count * chunk.source_dtype.itemsize == chunk.source_nbytes, chunk
    if offset_bytes % chunk.source_dtype.itemsize:
        # A file may hold a tensor at any byte, but vector loads want whole elements.
        ctypes.memmove(region.address, region.address + offset_bytes, chunk.source_nbytes)
        offset_bytes = 0
    elements = region.tensor(offset_bytes, (count,), chunk.source_dtype)
    target = torch.frombuffer(destination, dtype=chunk.dtype, count=count, offset=chunk.slot_offset_bytes)
    with torch.inference_mode():  # per thread: the caller's does not reach a worker
        sources, targets = torch.split(elements, SERIAL_COPY_ELEMENTS), torch.split(target, SERIAL_COPY_ELEMENTS)
        for source_part, target_part in zip(sources, targets, strict=True):
            target_part.copy_(source_part)
