"""JetMoE: each projection is a module of stacked matrices, which is called with rows that are sorted by expert.

A decoder layer has four such modules, two in the experts and two in the attention. Each is served as an MoE layer. Two
of them share a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .base import Adapter, Run


class JetMoeAdapter(Adapter):
    """The adapter of `JetMoeParallelExperts`."""

    sums_rows = False
    stacks = ("weight",)

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the stock loop without the experts that have no rows."""
        return _loop

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """Return the forward `inputs[P, in]` (sorted by expert), number of rows of each expert -> `[P, out]`."""

        def forward(inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
            sizes = torch.as_tensor(expert_size, device=inputs.device)
            index = torch.arange(len(sizes), device=inputs.device).repeat_interleave(sizes).unsqueeze(1)
            return run(inputs, index, inputs.new_ones(index.shape))

        return forward

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return the ids of the largest logits. The rest of the gate's output is the order of the rows."""
        ids: torch.Tensor = output[-1].topk(gate.top_k, dim=1).indices
        return ids


def _loop(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    experts, sizes = index.unique_consecutive(return_counts=True)
    if not len(experts):
        return hidden.new_zeros((0, self.weight.shape[1]))
    blocks = hidden.split(sizes.tolist())
    return torch.cat(
        [F.linear(block, self.weight[expert]) for block, expert in zip(blocks, experts.tolist(), strict=True)]
    )
