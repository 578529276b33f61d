"""What a store is: where every expert's weights always are. Knows bytes and where they lie; not slots, not policies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores.layout import DEFAULT_CHUNK_BYTES, PAGE_BYTES, ExpertLayout


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One of several ranges that a chunk is computed from: a tensor of `shape` and `dtype` in source `source_idx`.

    It is read to `offset_bytes` of the chunk's source bytes.
    """

    source_idx: int
    source_offset_bytes: int
    nbytes: int
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """Unit of transfer: a byte range of one source that lands at `slot_offset_bytes` of the expert's slot.

    `nbytes` are written at the destination. The source is `source_nbytes` at `source_offset_bytes` of the store's
    source number `source_idx` (a file or a tensor). `source_dtype` and `dtype` are both None when bytes are copied as
    they are; then `source_nbytes == nbytes`. Otherwise the elements are converted on arrival.

    A chunk with `compute` comes from several ranges, `parts`, of which the first is also the chunk's source; `compute`
    makes a tensor of `dtype` out of theirs.
    """

    slot_offset_bytes: int
    nbytes: int
    source_idx: int
    source_offset_bytes: int
    source_nbytes: int
    source_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    parts: tuple[ChunkPart, ...] = ()
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    @property
    def name(self) -> tuple[int, int, int]:
        """What tells it from all others of its store: whence it comes, and where in a slot it goes."""
        return self.source_idx, self.source_offset_bytes, self.slot_offset_bytes


@runtime_checkable
class Store(Protocol):
    """Where every expert's weights always are. All methods are thread-safe."""

    layouts: Sequence[ExpertLayout]
    """Per MoE layer, how one of its experts lies in a slot."""
    num_experts: Sequence[int]
    """Per MoE layer, how many experts it has."""
    expert_bytes: int
    """Bytes of all experts of all layers, as the model holds them (without padding)."""

    def chunks(self, key: ExpertKey) -> Sequence[Chunk]:
        """The transfers that fill an expert's slot; same count and destinations for every expert of a layer."""
        ...

    def chunk_bytes(self, layer_idx: int) -> tuple[int, ...]:
        """Destination bytes of each chunk; the same for every expert of that layer."""
        ...

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        """Copy the chunk's source bytes, unconverted, into `destination` (exactly `source_nbytes` long). Releases the
        GIL.

        Raises:
            OSError: the bytes cannot be read; the message names source, offset, bytes expected and found.
        """
        ...

    def describe(self, chunk: Chunk) -> str:
        """Where the chunk comes from, for error messages: "file model-00001.safetensors, offset 1234"."""
        ...

    def close(self) -> None:
        """Give back files; reading afterwards raises OSError. Closing twice is allowed."""
        ...


def split_at_pages(slot_offset_bytes: int, nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Split a range of a slot into about equal parts of at most `chunk_bytes`, at multiples of 4096 of the slot offset.

    Returns:
        (offset inside the range, bytes) of each part, in order, without gaps.

    Raises:
        ConfigError: `chunk_bytes` is not a positive multiple of 4096.
    """
    check_chunk_bytes(chunk_bytes)
    if nbytes <= chunk_bytes:
        return [(0, nbytes)]
    first_page, end = slot_offset_bytes // PAGE_BYTES, slot_offset_bytes + nbytes
    num_pages = -(-end // PAGE_BYTES) - first_page
    num_parts = -(-num_pages // (chunk_bytes // PAGE_BYTES))
    cuts = [(first_page + num_pages * part // num_parts) * PAGE_BYTES for part in range(1, num_parts)]
    edges = [slot_offset_bytes, *cuts, end]
    return [(start - slot_offset_bytes, stop - start) for start, stop in itertools.pairwise(edges)]


def first_chunks(store: Store, layer_idx: int, last: str) -> int:
    """How many chunks of an expert, from the first on, bring all of its tensors but those whose names begin with `last`.

    0 if those do not come last, or if all do.
    """
    layout, chunks = store.layouts[layer_idx], store.chunks(ExpertKey(layer_idx, 0))
    late = [spec for spec in layout.tensors if spec.name.startswith(last)]
    if not late or any(spec.offset_bytes < late[0].offset_bytes for spec in late):
        return 0
    count = next(
        (i for i, chunk in enumerate(chunks) if chunk.slot_offset_bytes + chunk.nbytes > late[0].offset_bytes), 0
    )
    arrived = sum(chunk.nbytes for chunk in chunks[:count])
    return count if arrived == sum(spec.nbytes for spec in layout.tensors if spec not in late) else 0


def first_tensors(store: Store, layer_idx: int, count: int) -> tuple[str, ...]:
    """The tensors of an expert that its first `count` chunks bring, by name."""
    chunks = store.chunks(ExpertKey(layer_idx, 0))[:count]
    end_bytes = chunks[-1].slot_offset_bytes + chunks[-1].nbytes if chunks else 0
    return tuple(spec.name for spec in store.layouts[layer_idx].tensors if spec.end_bytes <= end_bytes)


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise ConfigError unless `chunk_bytes` is a positive multiple of 4096."""
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ConfigError(
            f"The 'chunk_bytes' argument must be a positive multiple of {PAGE_BYTES} bytes. Got {chunk_bytes} instead. "
            f"Try {DEFAULT_CHUNK_BYTES}."
        )


def convert_chunk(chunk: Chunk, source: memoryview, destination: memoryview) -> None:
    """Put the bytes read for a chunk into their final form: `source` (`source_nbytes`) -> `destination` (`nbytes`).

    Rounds exactly as `Tensor.to(dtype)` does (to nearest, ties to even). Both must be aligned to their element sizes.
    """
    if chunk.compute is not None:
        compute_chunk(chunk, source, destination)
        return
    if chunk.dtype is None or chunk.source_dtype is None:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
        return
    elements = torch.frombuffer(source, dtype=chunk.source_dtype)
    torch.frombuffer(destination, dtype=chunk.dtype).copy_(elements)


def compute_chunk(chunk: Chunk, source: memoryview, destination: memoryview) -> None:
    """Compute a chunk from what was read for its parts: `source` (`source_nbytes`) -> `destination` (`nbytes`)."""
    assert chunk.compute is not None, chunk
    with torch.inference_mode():  # per thread: the caller's does not reach a worker
        tensors = [
            torch.frombuffer(
                source, dtype=part.dtype, count=part.nbytes // part.dtype.itemsize, offset=part.offset_bytes
            ).view(part.shape)
            for part in chunk.parts
        ]
        result = chunk.compute(tensors)
        assert result.dtype == chunk.dtype, (result.dtype, chunk)
        torch.frombuffer(destination, dtype=result.dtype).copy_(result.reshape(-1))


def read_expert(store: Store, key: ExpertKey, slot: memoryview) -> None:
    """Fill a whole slot (at least `slot_bytes` of the layer's layout) synchronously, chunk by chunk.

    Raises:
        OSError: as `Store.read`; the slot is then partly filled.
    """
    for chunk in store.chunks(key):
        destination = slot[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes]
        if chunk.dtype is None:
            store.read(chunk, destination)
        else:
            staging = memoryview(bytearray(chunk.source_nbytes))
            store.read(chunk, staging)
            convert_chunk(chunk, staging, destination)
