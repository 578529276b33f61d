"""Experts in files of their own, one per MoE layer, stored as they lie in a slot: reading one is a plain copy.

A file is a safetensors file whose only tensor, `slots[E, slot_bytes]`, begins at a page, as O_DIRECT requires.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from promoe.stores.checkpoint_plan import CheckpointPlan
from promoe.stores.layer_plan import LayerPlan, Piece, SourceRange, joined
from promoe.stores.layout import PAGE_BYTES, ExpertLayout
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_header import HEADER_LENGTH_BYTES, TensorRange
from promoe.stores.safetensors_store import SafetensorsStore

# The name of the tensor in a layer's file.
SLOTS = "slots"


def layer_path(folder: Path, layer_idx: int) -> Path:
    """Return the path of a MoE layer's file."""
    return folder / f"layer-{layer_idx:05}.safetensors"


def header_of(metadata: Mapping[str, str], num_experts: int, layout: ExpertLayout) -> bytes:
    """Return the header of a layer's file. `metadata` is for its writer's own use."""
    shape = [num_experts, layout.slot_bytes]
    header = {
        "__metadata__": dict(metadata),
        SLOTS: {"dtype": "U8", "shape": shape, "data_offsets": [0, shape[0] * shape[1]]},
    }
    content = json.dumps(header).encode()
    # The format allows spaces at the end of the header; with them the tensor begins at a page.
    content = content.ljust(-(-(len(content) + HEADER_LENGTH_BYTES) // PAGE_BYTES) * PAGE_BYTES - HEADER_LENGTH_BYTES)
    return len(content).to_bytes(HEADER_LENGTH_BYTES, "little") + content


def write_layer(path: Path, header: bytes, slots: Iterable[bytearray]) -> None:
    """Write a layer's file to disk, replacing an existing one. Each slot is written before the next one is taken.

    Raises:
        OSError: it cannot be written. Nothing is then at `path`, or what was there before.
    """
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(header)
            for slot in slots:
                file.write(slot)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)  # a process that has the old file open keeps it


class SlotFilesStore(SafetensorsStore):
    """A store over such files. It owns `files` and `source`, and closes them.

    Args:
        files: in the order of the layers.
        layouts: of the layers.
        num_experts: of the layers.
        chunk_bytes: longest chunk.
        source: the checkpoint that the experts were taken from; None: there is none, or nobody needs it.
    """

    def __init__(
        self,
        files: SafetensorsFiles,
        layouts: Sequence[ExpertLayout],
        num_experts: Sequence[int],
        chunk_bytes: int,
        source: SafetensorsStore | None = None,
    ) -> None:
        self._source = source
        layers = [
            _plan(layout, count, file.tensors[SLOTS], chunk_bytes)
            for layout, count, file in zip(layouts, num_experts, files.files, strict=True)
        ]
        super().__init__(files, CheckpointPlan(tuple(layers), frozenset()))

    def close(self) -> None:
        """Close the files, and the checkpoint's."""
        super().close()
        if self._source is not None:
            self._source.close()


def _plan(layout: ExpertLayout, num_experts: int, slots: TensorRange, chunk_bytes: int) -> LayerPlan:
    starts: Sequence[int] = [slots.offset_bytes + idx * layout.slot_bytes for idx in range(num_experts)]
    # Equal dtypes on both sides: the bytes of a slot are copied as they are.
    pieces = [
        Piece(
            spec.offset_bytes,
            spec.nbytes,
            torch.uint8,
            tuple(SourceRange(slots.file_idx, start + spec.offset_bytes, torch.uint8) for start in starts),
        )
        for spec in layout.tensors
    ]
    return LayerPlan(layout, num_experts, joined(pieces, chunk_bytes), chunk_bytes)
