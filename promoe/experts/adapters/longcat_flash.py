"""LongCat-Flash: a loop over stacked experts whose last ids are identities, without weights.

The parameter `gate_up_proj` has rows for them all the same, which nothing reads; `down_proj` has none. The loop cannot
be called with one choice per token, which is how promoe calls it, unless its `squeeze` is kept from dropping the choices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .base import Adapter, ExpertTensor, get_tensor, stock_forward


class LongcatFlashAdapter(Adapter):
    """`LongcatFlashExperts`."""

    def problem(self, experts: nn.Module) -> str | None:
        """A model may have identities only."""
        return None if self.num_experts(experts) else "it has identity experts only"

    def num_experts(self, experts: nn.Module) -> int:
        """Those with weights."""
        count: int = experts.num_routed_experts  # type: ignore[assignment]
        return count

    def num_ids(self, experts: nn.Module) -> int:
        """Identities included."""
        count: int = experts.total_experts  # type: ignore[assignment]
        return count

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """Gate and up in one, and down."""
        return tuple(ExpertTensor.stack(name, get_tensor(experts, name)) for name in ("gate_up_proj", "down_proj"))

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """The stock loop, for any number of choices."""
        return _loop


def _loop(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with _NoSqueeze() if index.shape[1] == 1 else nullcontext():
        return stock_forward(type(self))(self, hidden, index, weights)


class _NoSqueeze(TorchFunctionMode):
    """Leaves a dimension of size one where it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.squeeze else func(*args, **(kwargs or {}))
