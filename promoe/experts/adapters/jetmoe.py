"""JetMoE: each projection is a module of stacked matrices of its own, called with rows already sorted by expert.

Four of them per decoder layer (two in the experts, two in the attention); each is served as an MoE layer, and two of
them share a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .base import Adapter, ExpertTensor, Run, get_tensor


class JetMoeAdapter(Adapter):
    """`JetMoeParallelExperts`."""

    sums_rows = False

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """One matrix."""
        return (ExpertTensor.stack("weight", get_tensor(experts, "weight")),)

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """The stock one, less the experts without rows."""
        return _loop

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """`inputs[P, in]` sorted by expert and each expert's number of rows -> `[P, out]`."""

        def forward(inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
            sizes = torch.as_tensor(expert_size, device=inputs.device)
            index = torch.arange(len(sizes), device=inputs.device).repeat_interleave(sizes).unsqueeze(1)
            return run(inputs, index, inputs.new_ones(index.shape))

        return forward

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """The gate's output has the rows' order; the ids are those of the largest logits."""
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
