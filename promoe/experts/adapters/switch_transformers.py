"""Switch Transformers: one expert per token, given as a one-hot mask. A token beyond an expert's capacity has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .base import Run, stock_forward
from .expert_modules import ExpertModulesAdapter


class SwitchTransformersAdapter(ExpertModulesAdapter):
    """The adapter of `SwitchTransformersExperts`."""

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the stock loop, called with a mask made from the ids."""
        return _loop

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """Return the forward `hidden[T, H]`, `selected_experts[T, 1, E]` (a mask), `routing_weights[T, 1]` -> `[T, H]`."""

        def forward(
            hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
        ) -> torch.Tensor:
            kept = selected_experts.any(dim=-1)[:, 0]
            index = selected_experts.argmax(dim=-1)
            if kept.all():
                return run(hidden_states, index, routing_weights)
            result = torch.zeros_like(hidden_states)
            result[kept] = run(hidden_states[kept], index[kept], routing_weights[kept])
            return result

        return forward

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return the ids from the mask `[B, S, E]`. Tokens without an expert are left out."""
        # The mask is found by its dtype, because its position in the output changed after Transformers 5.17.
        mask: torch.Tensor = next(part for part in output if not part.is_floating_point()).flatten(0, -2)
        return mask[mask.any(dim=-1)].argmax(dim=-1, keepdim=True)


def _loop(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    mask = F.one_hot(index, num_classes=self.num_experts)  # type: ignore[arg-type]
    return stock_forward(type(self))(self, hidden, mask, weights)
