"""The registry of slot formats: which matrices each format can hold.

A format is one file in this folder and one line in `FORMATS`. All other code (pools, links, planning, kernels) uses the
format that a layout has for each tensor (`promoe.stores.layout.TensorSpec.format`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from promoe.errors import shown
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.kernels.int8 import Int8Format
from promoe.experts.kernels.matrices import SECOND, first_name
from promoe.experts.kernels.packed import PackedFormat
from promoe.experts.kernels.quantized import Quantized
from promoe.experts.moe_layers import MoELayer
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.stores.slot_format import MatrixFormat

# For each layout of a model: the formats of its tensors by name, without the plain ones.
Formats = Mapping[ExpertLayout, Mapping[str, MatrixFormat]]
# The only implementation whose products promoe computes itself, so that matrices may be in other formats.
IMPLEMENTATION = "grouped_mm"


class SlotFormat(Protocol):
    """One way to keep matrices in slots, with the kernel that multiplies by them.

    Attributes:
        name: the format's name in files and arguments.
        exact: see `MatrixFormat`.
    """

    name: str
    exact: bool

    def of(self, matrix: TensorSpec, transposed: bool) -> MatrixFormat | None:
        """Return the format for matrices of this shape and dtype on this machine; None: they have to stay plain.

        Args:
            matrix: a plain matrix.
            transposed: whether it is `[in, out]` instead of `[out, in]`.
        """
        ...

    def read(self, matrix: TensorSpec, transposed: bool, signature: str) -> MatrixFormat | None:
        """Return the format that has this signature; None: there is none for such matrices on this machine."""
        ...


FORMATS: dict[str, SlotFormat] = {
    made.name: made for made in (PackedFormat(), Int8Format(), Int4Format(4), Int4Format(3), Int4Format(2))
}
# The names of those that change the output.
QUANTIZED = tuple(name for name, made in FORMATS.items() if not made.exact)


def formats_of(layers: Sequence[MoELayer], slot_format: SlotFormat) -> Formats:
    """Return which tensors of the experts of `layers` can be kept in `slot_format` on this machine."""
    return {layer.layout: _of_layer(layer, slot_format) for layer in layers}


def _of_layer(layer: MoELayer, slot_format: SlotFormat) -> dict[str, MatrixFormat]:
    if slot_format.exact and layer.implementation != IMPLEMENTATION:
        return {}
    found = {spec.name: slot_format.of(spec, transposed) for spec, transposed in matrices(layer)}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


def read_formats(layer: MoELayer, entries: Any, on_device: bool) -> dict[str, MatrixFormat]:
    """Return the formats of a layer's tensors that a file names: for each, the format's name and signature.

    Args:
        layer: the layer.
        entries: what the file says.
        on_device: whether the slots are on a device, which expands quantised matrices and multiplies by no other format.

    Raises:
        ValueError: a format is unknown, or cannot be read on this machine or on a device.
    """
    specs = {spec.name: (spec, transposed) for spec, transposed in matrices(layer)}
    found: dict[str, MatrixFormat] = {}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        slot_format, signature = (
            (entry.get(key) for key in ("format", "signature")) if isinstance(entry, dict) else (None, None)
        )
        if slot_format not in FORMATS:
            raise ValueError(f"They are in the slot format {shown(slot_format)}, which this version does not know.")
        known = FORMATS[slot_format]
        usable = name in specs and (layer.implementation == IMPLEMENTATION or not known.exact)
        if on_device and known.exact:
            raise ValueError(f"They are in the format {slot_format!r}, which only a CPU can multiply by.")
        matrix = known.read(*specs[name], str(signature)) if usable else None
        if matrix is None or not (on_device or _fits_processor(matrix)):
            raise ValueError(
                f"They are in the format {slot_format!r} of another processor, number of threads, version of torch, model, "
                f"dtype or experts implementation (found for {name})."
            )
        found[name] = matrix
    return found


def form_in_words(layouts: Iterable[tuple[ExpertLayout, int]]) -> str:
    """Return in which form so many experts of these layouts are.

    For example "int4, 4.5 bits per weight", "packed", or "" if all are plain.
    """
    matrices = [(matrix, count) for layout, count in layouts for matrix in layout.formats.values()]
    names = "/".join(sorted({matrix.name for matrix, _ in matrices}, reverse=True))
    if all(matrix.exact for matrix, _ in matrices):
        return names
    nbytes = sum(matrix.nbytes * count for matrix, count in matrices)
    bits = 8 * nbytes / sum(math.prod(matrix.shape) * count for matrix, count in matrices)
    return f"{names}, {bits:.3g} bits per weight"


def _fits_processor(matrix: MatrixFormat) -> bool:
    return not isinstance(matrix, Quantized) or matrix.fits_processor


def matrices(layer: MoELayer) -> list[tuple[TensorSpec, bool]]:
    """Return the matrices of a layer's experts that kernels here multiply by, and whether each is `[in, out]`."""
    experts: Any = layer.experts
    # Experts that Transformers' `use_experts_implementation` did not make compute by code of their own.
    if not layer.adapter.sums_rows or not hasattr(experts, "is_transposed"):
        return []
    names, transposed = (first_name(experts), SECOND), bool(experts.is_transposed)
    return [(spec, transposed) for spec in layer.layout.tensors if spec.name in names]


def formats_in(layouts: Iterable[ExpertLayout]) -> Formats:
    """Return the formats that a store's `layouts` have, each by the layout of the same tensors in plain format."""
    return {layout.in_formats({}): layout.formats for layout in layouts if layout.formats}
