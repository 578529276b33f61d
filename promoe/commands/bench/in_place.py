"""Runs the experts of the unmodified model, where they are in memory, as this library runs them.

For a long prompt, and with packed experts, that takes less time than the unmodified model itself: it is the least possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from promoe.experts.kernels.formats import formats_in
from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer
from promoe.experts.routed_ids import chosen_experts
from promoe.model.attach import attach
from promoe.stores.layout import ExpertLayout
from promoe.stores.slot_format import MatrixFormat
from promoe.transfer.rows import ExpertRows, Row


def rows_of(layers: Sequence[MoELayer], packed: Collection[ExpertLayout]) -> list[ExpertRows]:
    """Return the rows of all experts of each layer, in the formats of the layouts in `packed`, and plain if it has none.

    Matrices in another format are copies, in other memory.
    """
    formats = formats_in(packed)
    return [_rows(layer, formats.get(layer.layout, {})) for layer in layers]


def _rows(layer: MoELayer, formats: Mapping[str, MatrixFormat]) -> ExpertRows:
    def row(name: str, tensor: torch.Tensor) -> Row:
        matrix = formats.get(name)
        return tensor if matrix is None else matrix.view(matrix.pack(tensor))

    stacks = layer.rows()
    return {expert: {name: row(name, stacks[name][expert]) for name in stacks} for expert in range(layer.num_experts)}


@contextmanager
def in_place(layers: Sequence[MoELayer], rows: Sequence[ExpertRows]) -> Iterator[None]:
    """Compute the experts of `layers`, all of them in memory, with this library's products while the context lasts."""
    with ExitStack() as undo:
        for layer, of_layer in zip(layers, rows, strict=True):
            undo.callback(attach(layer, _run(layer, of_layer), lambda *args: None))
        yield


def _run(layer: MoELayer, rows: ExpertRows) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, _ = chosen_experts(index)
        return LayerCall(layer, hidden, index, weights, tokens).run_resident(rows)

    return run
