"""LongCat-Flash: a loop over stacked experts. The last ids are identity experts, which have no weights.

The parameter `gate_up_proj` has rows for identity experts that nothing reads; `down_proj` has none. promoe calls the
loop with one choice per token. The loop's `squeeze` would drop that dimension, so it is made to do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .base import Adapter, stock_forward


class LongcatFlashAdapter(Adapter):
    """The adapter of `LongcatFlashExperts`."""

    stacks = ("gate_up_proj", "down_proj")

    def problem(self, experts: nn.Module) -> str | None:
        """Return why the module cannot be served: a model may have identity experts only."""
        return None if self.num_experts(experts) else "it has identity experts only"

    def num_experts(self, experts: nn.Module) -> int:
        """Return the number of experts with weights."""
        count: int = experts.num_routed_experts  # type: ignore[assignment]
        return count

    def num_ids(self, experts: nn.Module) -> int:
        """Return the number of ids, including those of identity experts."""
        count: int = experts.total_experts  # type: ignore[assignment]
        return count

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the stock loop, made to work for one choice per token."""
        return _loop


def _loop(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with _NoSqueeze() if index.shape[1] == 1 else nullcontext():
        return stock_forward(type(self))(self, hidden, index, weights)


class _NoSqueeze(TorchFunctionMode):
    """Makes `squeeze` do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.squeeze else func(*args, **(kwargs or {}))
