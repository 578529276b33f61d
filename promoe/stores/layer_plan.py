"""How the experts of one MoE layer are put together in their slots, and a store that follows such plans.

It knows ranges of sources (files or tensors) and of slots; not names, files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, ChunkPart, Store, split_at_pages
from promoe.stores.encodings.base import Encoding
from promoe.stores.expert_conversion import Decoding, ExpertConversion
from promoe.stores.layout import CACHE_LINE_BYTES, ExpertLayout, TensorSpec, round_up

# Makes the elements of a piece (`out`, flat) from the tensors of its parts.
Compute: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


class SourceRange(NamedTuple):
    """Where a piece of one expert lies: an offset in a source, and the dtype there."""

    source_idx: int
    offset_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of the slot that is one range of one source, for each expert of a layer (`sources[expert_idx]`)."""

    slot_offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    sources: tuple[SourceRange, ...]

    def split(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) of each chunk in the piece, in bytes of the slot."""
        return split_at_pages(self.slot_offset_bytes, self.nbytes, chunk_bytes)

    def chunk(self, expert_idx: int, offset_bytes: int, nbytes: int) -> Chunk:
        """Return an expert's chunk at an offset in the piece."""
        source = self.sources[expert_idx]
        converted = source.dtype != self.dtype
        return Chunk(
            slot_offset_bytes=self.slot_offset_bytes + offset_bytes,
            nbytes=nbytes,
            source_idx=source.source_idx,
            source_offset_bytes=source.offset_bytes + _source_bytes(offset_bytes, self.dtype, source.dtype),
            source_nbytes=_source_bytes(nbytes, self.dtype, source.dtype),
            source_dtype=source.dtype if converted else None,
            dtype=self.dtype if converted else None,
        )

    @property
    def source_idxs(self) -> frozenset[int]:
        """The sources of all experts."""
        return frozenset(source.source_idx for source in self.sources)

    def is_followed_by(self, other: Piece) -> bool:
        """Return whether `other` follows this piece without a gap, in the slot and in the source of every expert."""
        return (
            self.dtype == other.dtype
            and self.slot_offset_bytes + self.nbytes == other.slot_offset_bytes
            and all(
                a.source_idx == b.source_idx
                and a.dtype == b.dtype
                and a.offset_bytes + _source_bytes(self.nbytes, self.dtype, a.dtype) == b.offset_bytes
                for a, b in zip(self.sources, other.sources, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class ComputedPiece:
    """A range of the slot that is computed, for each expert of a layer, from several ranges (`sources[expert_idx]`)."""

    slot_offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    sources: tuple[tuple[ChunkPart, ...], ...]
    conversion: Compute

    @property
    def source_idxs(self) -> frozenset[int]:
        """The sources of all experts."""
        return frozenset(part.source_idx for parts in self.sources for part in parts)

    def split(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) of the only chunk: the piece is computed as a whole."""
        return [(0, self.nbytes)]

    def chunk(self, expert_idx: int, offset_bytes: int, nbytes: int) -> Chunk:
        """Return an expert's chunk, which is the whole piece."""
        parts = self.sources[expert_idx]
        return Chunk(
            slot_offset_bytes=self.slot_offset_bytes,
            nbytes=self.nbytes,
            source_idx=parts[0].source_idx,
            source_offset_bytes=parts[0].source_offset_bytes,
            source_nbytes=parts[-1].offset_bytes + parts[-1].nbytes,
            source_dtype=parts[0].dtype,
            dtype=self.dtype,
            parts=parts,
            compute=self.conversion,
        )


@dataclass(frozen=True)
class LayerPlan:
    """The pieces of every expert of one MoE layer, in slot order.

    Args:
        layout: where the tensors lie in a slot.
        num_experts: experts of the layer.
        pieces: the pieces of an expert, none of which has parts of two tensors.
        chunk_bytes: longest chunk, a multiple of 4096.
    """

    layout: ExpertLayout
    num_experts: int
    pieces: tuple[Piece | ComputedPiece, ...]
    chunk_bytes: int

    @cached_property
    def parts(self) -> tuple[tuple[Piece | ComputedPiece, int, int], ...]:
        """The piece, the offset in it and the bytes (both in the slot) of each chunk of an expert."""
        pieces = _joined(self.pieces, self.chunk_bytes)
        return tuple((piece, *part) for piece in pieces for part in piece.split(self.chunk_bytes))

    def pieces_of(self, spec: TensorSpec) -> list[Piece | ComputedPiece]:
        """Return the pieces of one tensor of the layout, in slot order."""
        return [piece for piece in self.pieces if spec.offset_bytes <= piece.slot_offset_bytes < spec.end_bytes]

    @property
    def source_idxs(self) -> frozenset[int]:
        """The sources that have a part of any expert."""
        return frozenset().union(*(piece.source_idxs for piece in self.pieces))

    def chunks(self, expert_idx: int) -> list[Chunk]:
        """Return the expert's chunks, in slot order."""
        return [piece.chunk(expert_idx, offset_bytes, nbytes) for piece, offset_bytes, nbytes in self.parts]


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Some rows of a matrix that a checkpoint has in fewer bits: how `num_parts` tensors become them."""

    decoding: Decoding
    num_parts: int


def decoded_rows(plan: LayerPlan, spec: TensorSpec) -> list[DecodedRows] | None:
    """Return what the matrix `spec` of an expert is decoded from, from its first rows on; None: not all of it is."""
    found = [
        DecodedRows(piece.conversion, len(piece.sources[0]))
        for piece in plan.pieces_of(spec)
        if isinstance(piece, ComputedPiece) and isinstance(piece.conversion, Decoding)
    ]
    return found if found and len(found) == len(plan.pieces_of(spec)) else None


def encodings_of(plan: LayerPlan) -> set[Encoding]:
    """Return the encodings that the experts of a layer are decoded from."""
    conversions = [piece.conversion for piece in plan.pieces if isinstance(piece, ComputedPiece)]
    return {
        encoding for one in conversions if isinstance(one, Decoding | ExpertConversion) for encoding in one.encodings
    }


def relaid(plan: LayerPlan, layout: ExpertLayout, computed: Mapping[str, Compute]) -> LayerPlan:
    """Return the plan with another layout, in which some tensors are computed otherwise, from the same sources.

    Args:
        plan: of all experts.
        layout: has the same tensors; those that are not in `computed` have the same formats.
        computed: by name, what makes all bytes of a tensor from the parts of all its pieces.
    """
    pieces: list[Piece | ComputedPiece] = []
    for spec, target in zip(plan.layout.tensors, layout.tensors, strict=True):
        if (compute := computed.get(spec.name)) is not None:
            sources = tuple(
                _side_by_side([part for piece in plan.pieces_of(spec) for part in _parts_of(piece, idx)])
                for idx in range(plan.num_experts)
            )
            pieces.append(ComputedPiece(target.offset_bytes, target.nbytes, torch.uint8, sources, compute))
            continue
        shift = target.offset_bytes - spec.offset_bytes
        pieces += (replace(piece, slot_offset_bytes=piece.slot_offset_bytes + shift) for piece in plan.pieces_of(spec))
    return replace(plan, layout=layout, pieces=tuple(pieces))


def _parts_of(piece: Piece | ComputedPiece, expert_idx: int) -> tuple[ChunkPart, ...]:
    assert isinstance(piece, ComputedPiece), piece
    return piece.sources[expert_idx]


def _side_by_side(parts: Sequence[ChunkPart]) -> tuple[ChunkPart, ...]:
    """Return the parts as they are read one after the other, each aligned."""
    found: list[ChunkPart] = []
    offset_bytes = 0
    for part in parts:
        found.append(replace(part, offset_bytes=offset_bytes))
        offset_bytes = round_up(offset_bytes + part.nbytes, CACHE_LINE_BYTES)
    return tuple(found)


def _joined(pieces: Sequence[Piece | ComputedPiece], chunk_bytes: int) -> tuple[Piece | ComputedPiece, ...]:
    """Join neighbours that are contiguous in the slot and in the sources, and together fit into one chunk."""
    result: list[Piece | ComputedPiece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if (
            isinstance(last, Piece)
            and isinstance(piece, Piece)
            and last.nbytes + piece.nbytes <= chunk_bytes
            and last.is_followed_by(piece)
        ):
            result[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            result.append(piece)
    return tuple(result)


class PlannedStore(Store):
    """The part of a store that follows from its layers' plans: sizes and chunks. How bytes are read is left open.

    Args:
        layers: the plan of each MoE layer.
    """

    def __init__(self, layers: Sequence[LayerPlan]) -> None:
        self._layers = layers
        self.layouts: Sequence[ExpertLayout] = [layer.layout for layer in layers]
        self.num_experts: Sequence[int] = [layer.num_experts for layer in layers]
        self.expert_bytes = sum(layer.layout.payload_bytes * layer.num_experts for layer in layers)
        self._chunks: dict[ExpertKey, tuple[Chunk, ...]] = {}
        self._chunk_bytes = [tuple(nbytes for _, _, nbytes in layer.parts) for layer in layers]

    def chunks(self, key: ExpertKey) -> tuple[Chunk, ...]:
        """Return the expert's chunks in slot order; made at the first call, the same objects afterwards."""
        chunks = self._chunks.get(key)
        if chunks is None:
            plan, number = self._plan_of(key)
            chunks = self._chunks.setdefault(key, tuple(plan.chunks(number)))
        return chunks

    def _plan_of(self, key: ExpertKey) -> tuple[LayerPlan, int]:
        """Return the plan that an expert belongs to, and its number there."""
        return self._layers[key.layer_idx], key.expert_idx

    def chunk_bytes(self, layer_idx: int) -> tuple[int, ...]:
        """See `Store.chunk_bytes`."""
        return self._chunk_bytes[layer_idx]


def _source_bytes(nbytes: int, dtype: torch.dtype, source_dtype: torch.dtype) -> int:
    return nbytes // dtype.itemsize * source_dtype.itemsize
