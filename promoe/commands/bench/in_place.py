"""Runs the experts of the unmodified model, where they are in memory, as this library runs them.

For a long prompt, and with packed experts, that takes less time than the unmodified model itself: it is the least possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from promoe.experts.kernels.formats import FORMATS, formats_of
from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer
from promoe.experts.routed_ids import chosen_experts
from promoe.model.attach import attach
from promoe.model.packed_files import DEFAULT_FORMAT
from promoe.stores.slot_format import MatrixFormat
from promoe.transfer.rows import ExpertRows, Row


def rows_of(layers: Sequence[MoELayer], packed: Collection[str]) -> list[ExpertRows]:
    """Return the rows of all experts of each layer. Tensors named in `packed` are packed if they can be, in other memory."""
    formats = formats_of(layers, FORMATS[DEFAULT_FORMAT]) if packed else {}
    return [_rows(layer, formats.get(layer.layout, {}), packed) for layer in layers]


def _rows(layer: MoELayer, formats: Mapping[str, MatrixFormat], packed: Collection[str]) -> ExpertRows:
    def row(name: str, tensor: torch.Tensor) -> Row:
        matrix = formats.get(name) if name in packed else None
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
