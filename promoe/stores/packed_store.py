"""Experts packed beforehand (`promoe.packed`), in files of their own beside the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from promoe.layout import ExpertLayout
from promoe.packed import Packing
from promoe.stores.checkpoint_plan import CheckpointPlan
from promoe.stores.expert_pieces import LayerPlan, Piece, SourceRange, coalesce
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_header import TensorRange
from promoe.stores.safetensors_store import SafetensorsStore

Packings = Mapping[ExpertLayout, Mapping[str, Packing]]
# What the tensor of a layer's file is called: the slots of all its experts, one after the other.
SLOTS = "slots"


class PackedStore(SafetensorsStore):
    """Store over the files of packed experts, one per layer.

    Takes over `files` and `plain`.

    Args:
        files: in the order of the layers.
        plain: the checkpoint that was packed; it is closed with this store.
        packings: of each layout, which tensors are packed, and how.
        chunk_bytes: longest chunk.
    """

    def __init__(self, files: SafetensorsFiles, plain: SafetensorsStore, packings: Packings, chunk_bytes: int) -> None:
        layers = [
            _plan(layout, count, file.tensors[SLOTS], chunk_bytes)
            for layout, count, file in zip(plain.layouts, plain.num_experts, files.files, strict=True)
        ]
        super().__init__(files, CheckpointPlan(tuple(layers), frozenset()))
        self.plain = plain
        self.packings = packings

    def close(self) -> None:
        """Close the files, and the checkpoint's."""
        super().close()
        self.plain.close()


def _plan(layout: ExpertLayout, num_experts: int, slots: TensorRange, chunk_bytes: int) -> LayerPlan:
    starts: Sequence[int] = [slots.offset_bytes + idx * layout.slot_bytes for idx in range(num_experts)]
    pieces = [
        Piece(
            spec.offset_bytes,
            spec.nbytes,
            spec.dtype,
            tuple(SourceRange(slots.file_idx, start + spec.offset_bytes, spec.dtype) for start in starts),
        )
        for spec in layout.tensors
    ]
    return LayerPlan(layout, num_experts, coalesce(pieces, chunk_bytes), chunk_bytes)
