"""The unmodified model's experts where they are, computed as this library computes them: the least that a prompt takes.

For a long prompt that is less than the unmodified model itself takes (`experts_forward`), so that it bounds the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from promoe.chosen import chosen_experts
from promoe.experts_forward import run_resident
from promoe.moe_layers import MoELayer
from promoe.seam import attach


@contextmanager
def in_place(layers: Sequence[MoELayer]) -> Iterator[None]:
    """While it lasts, the experts of `layers`, all of them in memory, go through this library's products."""
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(attach(layer, _run(layer), lambda *args: None))
        yield


def _run(layer: MoELayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    stacks = layer.rows()
    rows = {expert: {name: stack[expert] for name, stack in stacks.items()} for expert in range(layer.num_experts)}

    def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, _ = chosen_experts(index)
        return run_resident(layer, hidden, index, weights, rows, tokens)

    return run
