"""The parts of which an expert is put together in its slot, and their transfers. Knows ranges; not names or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from promoe.stores.base import Chunk, ChunkPart, split_at_pages
from promoe.stores.expert_conversion import ExpertConversion
from promoe.stores.layout import ExpertLayout


class SourceRange(NamedTuple):
    """Where one expert's part lies: an offset in a file, and the dtype there."""

    file_idx: int
    offset_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of the slot that is one range of one file, for each expert of a layer (`sources[expert_idx]`)."""

    slot_offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    sources: tuple[SourceRange, ...]


@dataclass(frozen=True, slots=True)
class ComputedPiece:
    """A range of the slot that is computed, for each expert of a layer, from several ranges (`sources[expert_idx]`)."""

    slot_offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    sources: tuple[tuple[ChunkPart, ...], ...]
    conversion: ExpertConversion

    def chunk(self, expert_idx: int) -> Chunk:
        """The expert's; it cannot be had in parts."""
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
    """How the experts of one MoE layer are put together from the files."""

    layout: ExpertLayout
    num_experts: int
    pieces: tuple[Piece | ComputedPiece, ...]
    chunk_bytes: int

    @cached_property
    def parts(self) -> tuple[tuple[Piece | ComputedPiece, int, int], ...]:
        """Per chunk: its piece, the offset in it and the bytes, both at the destination."""
        return tuple(
            (piece, offset_bytes, nbytes) for piece in self.pieces for offset_bytes, nbytes in self._split(piece)
        )

    def _split(self, piece: Piece | ComputedPiece) -> list[tuple[int, int]]:
        if isinstance(piece, ComputedPiece):
            return [(0, piece.nbytes)]
        return split_at_pages(piece.slot_offset_bytes, piece.nbytes, self.chunk_bytes)

    def chunks(self, expert_idx: int) -> list[Chunk]:
        """The expert's chunks, in slot order."""
        return [
            piece.chunk(expert_idx)
            if isinstance(piece, ComputedPiece)
            else _chunk(piece, piece.sources[expert_idx], offset_bytes, nbytes)
            for piece, offset_bytes, nbytes in self.parts
        ]


def coalesce(pieces: Sequence[Piece | ComputedPiece], chunk_bytes: int) -> tuple[Piece | ComputedPiece, ...]:
    """Join neighbours that are contiguous in slot and file for every expert and fit in one chunk together."""
    joined: list[Piece | ComputedPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            isinstance(last, Piece)
            and isinstance(piece, Piece)
            and last.nbytes + piece.nbytes <= chunk_bytes
            and _adjacent(last, piece)
        ):
            joined[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return tuple(joined)


def _adjacent(left: Piece, right: Piece) -> bool:
    return (
        left.dtype == right.dtype
        and left.slot_offset_bytes + left.nbytes == right.slot_offset_bytes
        and all(
            a.file_idx == b.file_idx
            and a.dtype == b.dtype
            and a.offset_bytes + _source_bytes(left.nbytes, left.dtype, a.dtype) == b.offset_bytes
            for a, b in zip(left.sources, right.sources, strict=True)
        )
    )


def _chunk(piece: Piece, source: SourceRange, offset_bytes: int, nbytes: int) -> Chunk:
    converted = source.dtype != piece.dtype
    return Chunk(
        slot_offset_bytes=piece.slot_offset_bytes + offset_bytes,
        nbytes=nbytes,
        source_idx=source.file_idx,
        source_offset_bytes=source.offset_bytes + _source_bytes(offset_bytes, piece.dtype, source.dtype),
        source_nbytes=_source_bytes(nbytes, piece.dtype, source.dtype),
        source_dtype=source.dtype if converted else None,
        dtype=piece.dtype if converted else None,
    )


def _source_bytes(nbytes: int, dtype: torch.dtype, source_dtype: torch.dtype) -> int:
    return nbytes // dtype.itemsize * source_dtype.itemsize
