"""The slot formats that there are: for each, what can be kept in it, and what is worth it.

A format is one file beside this one and one line in `FORMATS`. Everything else goes by what a layout says of its
tensors (`promoe.stores.layout.TensorSpec.format`): pools, links, planning and the kernels for groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from promoe.experts.kernels.matrices import SECOND, first_name
from promoe.experts.kernels.packed import PackedFormat
from promoe.experts.moe_layers import MoELayer
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.stores.slot_format import MatrixFormat

# Of each layout of a model, the formats of the tensors that are not plain ones, by name.
Formats = Mapping[ExpertLayout, Mapping[str, MatrixFormat]]
# The implementation whose matrices are multiplied here, not by the model's own code.
IMPLEMENTATION = "grouped_mm"


class SlotFormat(Protocol):
    """One way to keep matrices in slots, with the kernel that multiplies by them.

    Attributes:
        name: what it is called in files.
    """

    name: str

    def of(self, matrix: TensorSpec, transposed: bool) -> MatrixFormat | None:
        """Return how such matrices are kept on this machine; None: they cannot be, and stay as they are.

        Args:
            matrix: plain.
            transposed: whether it is `[in, out]`; else `[out, in]`.
        """
        ...

    def gain(self, matrix: MatrixFormat) -> float:
        """Return how many times as fast one token's row is multiplied in this format as in the model's own, measured."""
        ...


FORMATS: dict[str, SlotFormat] = {made.name: made for made in (PackedFormat(),)}


def formats_of(layers: Sequence[MoELayer], slot_format: SlotFormat) -> Formats:
    """Return what of the experts of `layers` can be kept in `slot_format` on this machine."""
    return {layer.layout: _of_layer(layer, slot_format) for layer in layers}


def _of_layer(layer: MoELayer, slot_format: SlotFormat) -> dict[str, MatrixFormat]:
    if not layer.adapter.sums_rows or layer.implementation != IMPLEMENTATION:
        return {}
    experts = layer.experts
    names, transposed = (first_name(experts), SECOND), bool(experts.is_transposed)
    found = {spec.name: slot_format.of(spec, transposed) for spec in layer.layout.tensors if spec.name in names}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


def formats_in(layouts: Sequence[ExpertLayout]) -> Formats:
    """Return what `layouts` (a store's) say: by the layout of the same tensors as the model has them."""
    return {layout.in_formats({}): layout.formats for layout in layouts if layout.formats}
