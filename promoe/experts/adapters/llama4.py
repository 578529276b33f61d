"""Llama 4: every expert multiplies every token, scaled beforehand by its weight. The weight is zero if it was not chosen.

An expert turns a row of zeros into zeros, so an expert that has only such rows is not needed. The other experts must
multiply all rows, because the bits of a product depend on the number of rows. They must be a batch of at least two
experts, because torch multiplies a batch of one in another way. (Their weights are copied into the batch, as in
`batched_mm`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .base import Adapter, Run


class Llama4Adapter(Adapter):
    """The adapter of `Llama4TextExperts`."""

    sums_rows = False
    stacks = ("gate_up_proj", "down_proj")  # both `[in, out]`

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return a loop that computes the stock products for the experts that have rows."""
        return _loop

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """Return the forward `hidden[E * T, H]` (expert by expert) -> `[E * T, H]`."""
        num_experts = self.num_experts(experts)  # read here, because `forward` must not refer to the module

        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            by_expert = hidden_states.view(num_experts, -1, hidden_states.shape[-1])
            needed = by_expert.flatten(1).any(dim=1).nonzero()[:, 0]
            index = needed.repeat_interleave(by_expert.shape[1]).unsqueeze(1)
            rows = by_expert[needed].flatten(0, 1)
            result = torch.zeros_like(by_expert)
            result[needed] = run(rows, index, rows.new_ones(index.shape)).view(len(needed), *by_expert.shape[1:])
            return result.view(-1, hidden_states.shape[-1])

        return forward

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return the ids of the largest logits. The gate returns only scores and logits."""
        ids: torch.Tensor = output[1].topk(gate.top_k, dim=1).indices
        return ids


def _loop(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    experts, sizes = index.unique_consecutive(return_counts=True)
    if not len(experts):
        return torch.zeros_like(hidden)
    ids = experts if len(experts) > 1 else experts.expand(2)
    rows = hidden.view(len(experts), int(sizes[0]), -1).expand(len(ids), -1, -1)
    gate, up = torch.bmm(rows, self.gate_up_proj[ids]).chunk(2, dim=-1)
    out = torch.bmm(up * self.act_fn(gate), self.down_proj[ids])
    return out[: len(experts)].reshape(hidden.shape)
