"""Jamba: the general contract. But up to Transformers 5.20, the gate returns only logits, and the block chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .stacked import StackedAdapter


class JambaAdapter(StackedAdapter):
    """The adapter of `JambaExperts`."""

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return what the gate chose, or what the block will choose from the gate's logits."""
        if isinstance(output, torch.Tensor):
            output = block.route_tokens_to_experts(output, output)  # type: ignore[operator]
        return super().chosen(gate, block, output)
