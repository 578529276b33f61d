"""DBRX: a submodule has the matrices of all experts, one below the other, in flat parameters `[E * F, H]`.

The gate returns only logits, and the block chooses from them. The experts are called with `[B, S, H]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .base import Adapter, ExpertTensor, Run, get_tensor, module_with, part_with, stock_forward

_NAMES = ("w1", "v1", "w2")


class DbrxAdapter(Adapter):
    """The adapter of `DbrxExperts`."""

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """Return three matrices `[F, H]`."""
        shape: Any = (experts.ffn_hidden_size, experts.hidden_size)
        paths = [f"mlp.{name}" for name in _NAMES]
        return tuple(ExpertTensor.stack(path, get_tensor(experts, path), shape) for path in paths)

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the stock loop, with an output `[T, H]`."""
        return _loop

    def stand_in(self, experts: nn.Module, banks: Mapping[str, Any]) -> nn.Module:
        """Return a stand-in whose submodule has the banks in place of its parameters."""
        mlp = part_with(experts.get_submodule("mlp"), {name: banks[f"mlp.{name}"] for name in _NAMES})
        return module_with(experts, {"mlp": mlp})

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """Return the forward `hidden[B, S, H]`, `top_k_index`, `top_k_weights` -> `[B, S, H]`."""

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            flat = hidden_states.reshape(-1, hidden_states.shape[-1])
            return run(flat, top_k_index, top_k_weights).view(hidden_states.shape[0], -1, flat.shape[1])

        return forward

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return what the block will choose from the gate's logits."""
        _, index = block.route_tokens_to_experts(output)  # type: ignore[operator]
        return index if isinstance(index, torch.Tensor) else None


def _loop(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return stock_forward(type(self))(self, hidden, index, weights).view(hidden.shape)
