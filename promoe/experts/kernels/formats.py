"""The registry of slot formats: which matrices each format can hold, and how much faster it multiplies.

A format is one file in this folder and one line in `FORMATS`. All other code (pools, links, planning, kernels) uses the
format that a layout has for each tensor (`promoe.stores.layout.TensorSpec.format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from promoe.experts.kernels.matrices import SECOND, first_name
from promoe.experts.kernels.packed import PackedFormat
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
        name: the format's name in files.
    """

    name: str

    def of(self, matrix: TensorSpec, transposed: bool) -> MatrixFormat | None:
        """Return the format for matrices of this shape and dtype on this machine; None: they have to stay plain.

        Args:
            matrix: a plain matrix.
            transposed: whether it is `[in, out]` instead of `[out, in]`.
        """
        ...

    def gain(self, matrix: MatrixFormat) -> float:
        """Return the measured speedup of one token's product in this format over the model's own format."""
        ...


FORMATS: dict[str, SlotFormat] = {made.name: made for made in (PackedFormat(),)}


def formats_of(layers: Sequence[MoELayer], slot_format: SlotFormat) -> Formats:
    """Return which tensors of the experts of `layers` can be kept in `slot_format` on this machine."""
    return {layer.layout: _of_layer(layer, slot_format) for layer in layers}


def _of_layer(layer: MoELayer, slot_format: SlotFormat) -> dict[str, MatrixFormat]:
    if not layer.adapter.sums_rows or layer.implementation != IMPLEMENTATION:
        return {}
    experts = layer.experts
    names, transposed = (first_name(experts), SECOND), bool(experts.is_transposed)
    found = {spec.name: slot_format.of(spec, transposed) for spec in layer.layout.tensors if spec.name in names}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


def formats_in(layouts: Iterable[ExpertLayout]) -> Formats:
    """Return the formats that a store's `layouts` have, each by the layout of the same tensors in plain format."""
    return {layout.in_formats({}): layout.formats for layout in layouts if layout.formats}
