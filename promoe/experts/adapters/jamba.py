"""Jamba: the general contract, but up to Transformers 5.20 its gate returns logits only, and the block chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .stacked import StackedAdapter


class JambaAdapter(StackedAdapter):
    """`JambaExperts`."""

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """What the block will choose, where the gate has not chosen yet."""
        if isinstance(output, torch.Tensor):
            output = block.route_tokens_to_experts(output, output)  # type: ignore[operator]
        return super().chosen(gate, block, output)
