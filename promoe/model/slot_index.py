"""What a folder of experts in a slot format says about them: `experts.json`, and the headers of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promoe.experts.kernels.formats import Formats, read_formats
from promoe.experts.moe_layers import MoELayer
from promoe.files import loads
from promoe.scheduler import ExpertKey
from promoe.stores.base import HotLayouts
from promoe.stores.file_store import FileStore
from promoe.stores.layer_plan import encodings_of
from promoe.stores.layout import ExpertLayout
from promoe.stores.slot_files import header_of, in_kinds
from promoe.stores.slot_format import MatrixFormat

INDEX, FORMAT = "experts.json", 3

# For each entry of the index: what is different if the entry is.
DIFFERENCES = {
    "checkpoint": "other files, or the checkpoint was written since",
    # Only where the checkpoint has experts in fewer bits.
    "encodings": "a checkpoint whose config.json says otherwise how it is quantised",
    "layers": "another model, or another dtype",
    "matrices": "another model, or another dtype",
    "method": "another method",
    # Only where some experts are hot. Older folders have the same digest without it.
    "hot": "another model, or another dtype",
}


@dataclass(frozen=True, slots=True)
class HotFormats:
    """The hot experts of a model, and the formats that their matrices are to have."""

    experts: frozenset[ExpertKey]
    formats: Formats


@dataclass(frozen=True, slots=True)
class Forms:
    """How the experts of each layer lie in their slots."""

    layouts: Sequence[ExpertLayout]
    hot: HotLayouts | None = None

    @classmethod
    def of(cls, layers: Sequence[MoELayer], formats: Formats, hot: HotFormats | None = None) -> Forms:
        """Return the forms of layers whose matrices have these formats; matrices without a format are plain."""
        of_hot = None if hot is None else HotLayouts(hot.experts, _layouts(layers, hot.formats))
        return cls(_layouts(layers, formats), of_hot)

    @property
    def all_layouts(self) -> list[ExpertLayout]:
        """The layouts of all layers, and those of their hot experts."""
        return [*self.layouts, *(() if self.hot is None else self.hot.layouts)]

    @property
    def matrices(self) -> list[MatrixFormat]:
        """The formats of all matrices that are not plain."""
        return [matrix for layout in self.all_layouts for matrix in layout.formats.values()]

    def in_file(self, layer: MoELayer) -> list[tuple[ExpertLayout, list[int]]]:
        """Return the experts of a layer in the order in which they lie in its file, by layout."""
        layout, hot = self.layouts[layer.layer_idx], self.hot
        if hot is None:
            return [(layout, list(range(layer.num_experts)))]
        ordinary, of_hot = in_kinds(layer.layer_idx, layer.num_experts, hot.experts)
        return [(hot.layouts[layer.layer_idx], of_hot), (layout, ordinary)]

    def nbytes(self, layer: MoELayer) -> int:
        """Return the bytes that all experts of a layer take in slots."""
        return sum(layout.slot_bytes * len(experts) for layout, experts in self.in_file(layer))

    def header(self, layer: MoELayer, digest: str) -> bytes:
        """Return the header of a layer's file. Its checksum tells the files of two calls in one folder apart."""
        *of_hot, (layout, _) = self.in_file(layer)
        hot_layout, hot = of_hot[0] if of_hot else (None, [])
        metadata = {"layer": layer.name, "sha256": digest}
        return header_of(metadata, layer.num_experts, layout, len(hot), hot_layout)


def _layouts(layers: Sequence[MoELayer], formats: Formats) -> list[ExpertLayout]:
    return [layer.layout.in_formats(formats.get(layer.layout, {})) for layer in layers]


def forms_in(index: Any, layers: Sequence[MoELayer], on_device: bool = False) -> Forms:
    """Return the forms that an index describes.

    Args:
        index: the content of an `experts.json`.
        layers: the model's MoE layers.
        on_device: whether the slots will be on a device.

    Raises:
        ValueError: it is not an index, or has formats that cannot be read here.
    """
    if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("method"), str):
        raise ValueError(f"{INDEX} is not in format {FORMAT}.")
    layouts = _layouts_in(index, layers, on_device)
    if (hot := index.get("hot")) is None:
        return Forms(layouts)
    if on_device:
        raise ValueError("They have more bits for some experts of a layer (--hot), which only slots in RAM can hold.")
    entries = hot.get("experts") if isinstance(hot, dict) else None
    if not isinstance(entries, list) or len(entries) != len(layers):
        raise ValueError(f"They are of {DIFFERENCES['hot']}.")
    experts = frozenset(
        key for layer, of_layer in zip(layers, entries, strict=True) for key in _hot_experts(layer, of_layer)
    )
    return Forms(layouts, HotLayouts(experts, _layouts_in(hot, layers, on_device)))


def _hot_experts(layer: MoELayer, entry: Any) -> list[ExpertKey]:
    experts = list(range(layer.num_experts))
    found = [idx for idx in experts if isinstance(entry, list) and idx in entry]
    if entry != found or not 0 < len(found) < len(experts):
        raise ValueError(f"{INDEX} names hot experts that a layer of {layer.num_experts} cannot have: {layer.name}.")
    return [ExpertKey(layer.layer_idx, idx) for idx in found]


def _layouts_in(index: Mapping[str, Any], layers: Sequence[MoELayer], on_device: bool) -> list[ExpertLayout]:
    entries = index.get("matrices")
    if not isinstance(entries, list) or len(entries) != len(layers):
        raise ValueError(f"They are of {DIFFERENCES['layers']}.")
    return [
        layer.layout.in_formats(read_formats(layer, entry, on_device))
        for layer, entry in zip(layers, entries, strict=True)
    ]


def index_of(layers: Sequence[MoELayer], forms: Forms, store: FileStore, method: str) -> dict[str, Any]:
    """Return the index of a folder, as JSON will have it.

    Args:
        layers: the model's MoE layers.
        forms: of the experts in the folder.
        store: the checkpoint that they were taken from.
        method: how they were encoded.
    """
    index = {
        "format": FORMAT,
        "method": method,
        "torch": torch.__version__,
        "checkpoint": [
            {
                "name": file.path.name,
                "size_bytes": file.fingerprint.size_bytes,
                "header_crc": file.fingerprint.header_crc,
                "samples_crc": file.fingerprint.samples_crc,
            }
            for file in store.files
        ],
        "layers": [
            _layer_entry(layer.name, layer.num_experts, layout)
            for layer, layout in zip(layers, forms.layouts, strict=True)
        ],
        "matrices": [_matrices_entry(layout) for layout in forms.layouts],
    }
    if any(encodings := [sorted(map(repr, encodings_of(plan))) for plan in store.layers]):
        index["encodings"] = encodings
    if (hot := forms.hot) is not None:
        index["hot"] = {
            "experts": [in_kinds(layer.layer_idx, layer.num_experts, hot.experts)[1] for layer in layers],
            "matrices": [_matrices_entry(layout) for layout in hot.layouts],
        }
    plain: dict[str, Any] = loads(json.dumps(index).encode())
    return plain


def _layer_entry(name: str, num_experts: int, layout: ExpertLayout) -> dict[str, Any]:
    tensors = [[spec.name, list(spec.shape), str(spec.dtype), spec.offset_bytes] for spec in layout.tensors]
    return {"name": name, "num_experts": num_experts, "slot_bytes": layout.slot_bytes, "tensors": tensors}


def _matrices_entry(layout: ExpertLayout) -> dict[str, Any]:
    return {name: {"format": one.name, "signature": one.signature} for name, one in layout.formats.items()}


def digest_of(index: Mapping[str, Any]) -> str:
    """Return a checksum of what was written."""
    what = json.dumps({key: index[key] for key in DIFFERENCES if key in index}, sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()
