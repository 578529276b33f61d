"""Experts in files of their own, one per MoE layer, stored as they lie in a slot: reading one is a plain copy.

A file is a safetensors file whose first tensor begins at a page, as O_DIRECT requires. `slots[E, slot_bytes]` holds all
experts, by number. If some experts of the layer are hot (`HotLayouts`), they are in `hot_slots`, and `slots` has the
others. `hot_slots` comes first: with more bits, its slots are whole pages wherever those of `slots` are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from promoe.scheduler import ExpertKey
from promoe.stores.base import HotLayouts
from promoe.stores.checkpoint_plan import CheckpointPlan
from promoe.stores.file_store import FileStore
from promoe.stores.layer_plan import LayerPlan, Piece, SourceRange
from promoe.stores.layout import PAGE_BYTES, ExpertLayout
from promoe.stores.safetensors_header import HEADER_LENGTH_BYTES, TensorRange
from promoe.stores.tensor_files import TensorFiles

# The names of the tensors in a layer's file.
SLOTS, HOT_SLOTS = "slots", "hot_slots"


def layer_path(folder: Path, layer_idx: int) -> Path:
    """Return the path of a MoE layer's file."""
    return folder / f"layer-{layer_idx:05}.safetensors"


def header_of(
    metadata: Mapping[str, str],
    num_experts: int,
    layout: ExpertLayout,
    num_hot: int = 0,
    hot_layout: ExpertLayout | None = None,
) -> bytes:
    """Return the header of a layer's file.

    Args:
        metadata: for its writer's own use.
        num_experts: of the layer.
        layout: how its experts lie in a slot.
        num_hot: how many of them are hot.
        hot_layout: how these lie in a slot.
    """
    shapes = {SLOTS: [num_experts - num_hot, layout.slot_bytes]}
    if hot_layout is not None:
        shapes = {HOT_SLOTS: [num_hot, hot_layout.slot_bytes], **shapes}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (count, slot_bytes) in shapes.items():
        end = start + count * slot_bytes
        header[name] = {"dtype": "U8", "shape": [count, slot_bytes], "data_offsets": [start, end]}
        start = end
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


class SlotFilesStore(FileStore):
    """A store over such files. It owns `files` and `source`, and closes them.

    Args:
        files: in the order of the layers.
        layouts: of the layers, and of their experts that are not `hot`.
        num_experts: of the layers.
        chunk_bytes: longest chunk.
        source: the checkpoint that the experts were taken from; None: there is none, or nobody needs it.
        hot: experts in other layouts, which are in `hot_slots`.
    """

    def __init__(
        self,
        files: TensorFiles,
        layouts: Sequence[ExpertLayout],
        num_experts: Sequence[int],
        chunk_bytes: int,
        source: FileStore | None = None,
        hot: HotLayouts | None = None,
    ) -> None:
        self._source = source
        numbers = [_numbers(layer_idx, count, hot) for layer_idx, count in enumerate(num_experts)]
        layers = [
            _plan(layout, len(others), file.tensors[SLOTS], chunk_bytes)
            for layout, (others, _), file in zip(layouts, numbers, files.files, strict=True)
        ]
        super().__init__(files, CheckpointPlan(tuple(layers)))
        if hot is not None:
            self.hot, self.num_experts = hot, num_experts
            self._numbers = numbers
            self._hot_layers = [
                _plan(layout, len(of_hot), file.tensors[HOT_SLOTS], chunk_bytes)
                for layout, (_, of_hot), file in zip(hot.layouts, numbers, files.files, strict=True)
            ]
            self.expert_bytes += sum(plan.layout.payload_bytes * plan.num_experts for plan in self._hot_layers)

    def _plan_of(self, key: ExpertKey) -> tuple[LayerPlan, int]:
        if self.hot is None:
            return super()._plan_of(key)
        others, of_hot = self._numbers[key.layer_idx]
        if key in self.hot.experts:
            return self._hot_layers[key.layer_idx], of_hot[key.expert_idx]
        return self._layers[key.layer_idx], others[key.expert_idx]

    def close(self) -> None:
        """Close the files, and the checkpoint's."""
        super().close()
        if self._source is not None:
            self._source.close()


def _numbers(layer_idx: int, num_experts: int, hot: HotLayouts | None) -> tuple[dict[int, int], dict[int, int]]:
    """Return the place of each ordinary expert of a layer in `slots`, and that of each hot one in `hot_slots`."""
    ordinary, of_hot = in_kinds(layer_idx, num_experts, frozenset() if hot is None else hot.experts)
    return {idx: place for place, idx in enumerate(ordinary)}, {idx: place for place, idx in enumerate(of_hot)}


def in_kinds(layer_idx: int, num_experts: int, hot: Collection[ExpertKey]) -> tuple[list[int], list[int]]:
    """Return the ordinary experts of a layer and the hot ones, each in the order in which they lie in its file."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for expert_idx in range(num_experts):
        kinds[ExpertKey(layer_idx, expert_idx) in hot].append(expert_idx)
    return kinds


def _plan(layout: ExpertLayout, num_experts: int, slots: TensorRange, chunk_bytes: int) -> LayerPlan:
    starts: Sequence[int] = [slots.offset_bytes + idx * layout.slot_bytes for idx in range(num_experts)]
    # Equal dtypes on both sides: the bytes of a slot are copied as they are.
    pieces = tuple(
        Piece(
            spec.offset_bytes,
            spec.nbytes,
            torch.uint8,
            tuple(SourceRange(slots.file_idx, start + spec.offset_bytes, torch.uint8) for start in starts),
        )
        for spec in layout.tensors
    )
    return LayerPlan(layout, num_experts, pieces, chunk_bytes)
