"""What a store is: the place where every expert's weights always are. It knows bytes and offsets; not slots or policies."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores.layout import DEFAULT_CHUNK_BYTES, PAGE_BYTES, ExpertLayout


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One of the ranges that a chunk is computed from: a tensor of `shape` and `dtype` in source `source_idx`.

    Its bytes are read to `offset_bytes` of the chunk's source bytes.
    """

    source_idx: int
    source_offset_bytes: int
    nbytes: int
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of transfer: a byte range of one source that goes to `slot_offset_bytes` of the expert's slot.

    The destination has `nbytes`. The source has `source_nbytes` at `source_offset_bytes` of the store's source number
    `source_idx` (a file or a tensor). `source_dtype` and `dtype` are both None when bytes are copied as they are; then
    `source_nbytes == nbytes`. Otherwise the elements are converted on arrival.

    A chunk with `compute` comes from several ranges, `parts`, of which the first is also the chunk's source.
    `compute(tensors, out)` makes the elements `out`, flat and of `dtype`, from the tensors of all parts.
    """

    slot_offset_bytes: int
    nbytes: int
    source_idx: int
    source_offset_bytes: int
    source_nbytes: int
    source_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    parts: tuple[ChunkPart, ...] = ()
    compute: Callable[[Sequence[torch.Tensor], torch.Tensor], None] | None = None

    @property
    def name(self) -> tuple[int, int, int]:
        """The source index, source offset and slot offset, which no other chunk of the store has."""
        return self.source_idx, self.source_offset_bytes, self.slot_offset_bytes


class SourceFile(Protocol):
    """A file that chunks come from."""

    @property
    def path(self) -> Path:
        """The file's path."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the store closed it because it holds no chunk."""
        ...

    @property
    def keep_open(self) -> bool:
        """Whether it must stay open, because nobody may be able to open it again."""
        ...

    def check_unchanged(self, fd: int) -> None:
        """Raise OSError, saying what changed, unless `fd` is this file, open, as it was when the store opened it."""
        ...


@dataclass(frozen=True, slots=True)
class HotLayouts:
    """Experts that lie in their slots otherwise than the rest of their layer: often used ones, in more bits.

    Args:
        experts: their names. Every layer has some, and some others.
        layouts: how one of them lies in a slot, for each MoE layer.
    """

    experts: frozenset[ExpertKey]
    layouts: Sequence[ExpertLayout]

    @property
    def per_layer(self) -> Counter[int]:
        """How many experts of each MoE layer are hot."""
        return Counter(key.layer_idx for key in self.experts)


@runtime_checkable
class Store(Protocol):
    """The place where every expert's weights always are: files, or tensors in RAM. All methods are thread-safe."""

    layouts: Sequence[ExpertLayout]
    """How an expert of each MoE layer lies in a slot, unless it is one of `hot`."""
    hot: HotLayouts | None = None
    """Experts in other layouts; None: all experts of a layer are alike."""
    num_experts: Sequence[int]
    """How many experts each MoE layer has."""
    expert_bytes: int
    """Bytes of all experts of all layers, as the model holds them (without padding)."""
    files: Sequence[SourceFile] = ()
    """The files that chunks come from, in the order of `Chunk.source_idx`; empty if experts are in RAM."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The model's own tensors that chunks come from; empty if experts are in files."""
        return ()

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's bytes in the model's own tensors, `[nbytes]` uint8, not to be written.

        Raises:
            OSError: experts are in files, or the store was closed.
        """
        raise OSError(errno.ENOTSUP, f"Not in RAM: {self.describe(chunk)}")

    def chunks(self, key: ExpertKey) -> Sequence[Chunk]:
        """Return the transfers that fill an expert's slot, in slot order.

        Their number and destinations are the same for every expert of a layer with the same layout.
        """
        ...

    def chunk_bytes(self, layer_idx: int) -> tuple[int, ...]:
        """Return the destination bytes of each chunk; the same for every expert of that layer that is not `hot`."""
        ...

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        """Copy the chunk's source bytes, unconverted, into `destination` (exactly `source_nbytes` long).

        The GIL is released meanwhile.

        Raises:
            OSError: the bytes cannot be read; the message names source, offset, bytes expected and found.
        """
        ...

    def describe(self, chunk: Chunk) -> str:
        """Return where the chunk comes from, for error messages: "file model-00001.safetensors, offset 1234"."""
        ...

    def close(self) -> None:
        """Close files, or drop tensors; reading afterwards raises OSError. Closing twice is allowed."""
        ...


def split_at_pages(slot_offset_bytes: int, nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Split a range of a slot into about equal parts of at most `chunk_bytes`, at slot offsets that are multiples of 4096.

    Returns:
        The (offset inside the range, bytes) of each part, in order, without gaps.

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


def layout_of(store: Store, key: ExpertKey) -> ExpertLayout:
    """Return how an expert lies in its slot."""
    hot = store.hot
    return (store if hot is None or key not in hot.experts else hot).layouts[key.layer_idx]


def layout_counts(store: Store) -> list[tuple[ExpertLayout, int]]:
    """Return how many experts of each layer have which layout: the ordinary ones of all layers, then the hot ones."""
    if (hot := store.hot) is None:
        return list(zip(store.layouts, store.num_experts, strict=True))
    num_hot = hot.per_layer
    ordinary = [count - num_hot[layer_idx] for layer_idx, count in enumerate(store.num_experts)]
    of_hot = [num_hot[layer_idx] for layer_idx in range(len(hot.layouts))]
    return [*zip(store.layouts, ordinary, strict=True), *zip(hot.layouts, of_hot, strict=True)]


def kinds(store: Store, layer_idx: int) -> list[ExpertKey]:
    """Return one expert of each layout that a layer's experts have: an ordinary one, and, if there are any, a hot one."""
    if (hot := store.hot) is None:
        return [ExpertKey(layer_idx, 0)]
    keys = [ExpertKey(layer_idx, expert_idx) for expert_idx in range(store.num_experts[layer_idx])]
    return [next(key for key in keys if (key in hot.experts) == is_hot) for is_hot in (False, True)]


def longest_chunk(store: Store) -> int:
    """Return the most bytes that a transfer of the store moves into a slot; 0: it has no layers."""
    keys = [key for layer_idx in range(len(store.num_experts)) for key in kinds(store, layer_idx)]
    return max((chunk.nbytes for key in keys for chunk in store.chunks(key)), default=0)


def first_chunks(store: Store, key: ExpertKey, last: str) -> int:
    """Return how many of an expert's first chunks bring all tensors but those whose names begin with `last`.

    Returns 0 if those do not come last, or if they share a chunk with others, or if there are no others.
    """
    layout, chunks = layout_of(store, key), store.chunks(key)
    late = [spec for spec in layout.tensors if spec.name.startswith(last)]
    if not late or any(spec.offset_bytes < late[0].offset_bytes for spec in late):
        return 0
    count = next(
        (i for i, chunk in enumerate(chunks) if chunk.slot_offset_bytes + chunk.nbytes > late[0].offset_bytes), 0
    )
    arrived = sum(chunk.nbytes for chunk in chunks[:count])
    return count if arrived == sum(spec.nbytes for spec in layout.tensors if spec not in late) else 0


def first_tensors(store: Store, key: ExpertKey, count: int) -> tuple[str, ...]:
    """Return the names of the tensors that an expert's first `count` chunks bring."""
    chunks = store.chunks(key)[:count]
    end_bytes = chunks[-1].slot_offset_bytes + chunks[-1].nbytes if chunks else 0
    return tuple(spec.name for spec in layout_of(store, key).tensors if spec.end_bytes <= end_bytes)


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise ConfigError unless `chunk_bytes` is a positive multiple of 4096."""
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ConfigError(
            f"The 'chunk_bytes' argument must be a positive multiple of {PAGE_BYTES} bytes. Got {chunk_bytes} instead. "
            f"Try {DEFAULT_CHUNK_BYTES}."
        )


def convert_chunk(chunk: Chunk, source: memoryview, destination: memoryview) -> None:
    """Convert the bytes read for a chunk: `source` (`source_nbytes`) -> `destination` (`nbytes`).

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
    """Compute a chunk from the bytes read for its parts: `source` (`source_nbytes`) -> `destination` (`nbytes`)."""
    assert chunk.compute is not None, chunk
    assert chunk.dtype is not None, chunk
    with torch.inference_mode():  # inference mode is per thread: the caller's does not reach a worker
        tensors = [
            torch.frombuffer(
                source, dtype=part.dtype, count=part.nbytes // part.dtype.itemsize, offset=part.offset_bytes
            ).view(part.shape)
            for part in chunk.parts
        ]
        chunk.compute(tensors, torch.frombuffer(destination, dtype=chunk.dtype))


def read_expert(store: Store, key: ExpertKey, slot: memoryview) -> None:
    """Fill a whole slot (at least `slot_bytes` of the expert's layout), chunk by chunk.

    Raises:
        OSError: as in `Store.read`; the slot is then partly filled.
    """
    for chunk in store.chunks(key):
        destination = slot[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes]
        if chunk.dtype is None:
            store.read(chunk, destination)
        else:
            staging = memoryview(bytearray(chunk.source_nbytes))
            store.read(chunk, staging)
            convert_chunk(chunk, staging, destination)
