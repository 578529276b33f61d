"""One MoE layer of a family's tiny model, and rows for its experts as slots would have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from zoo.families import build

from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer, find_moe_layers


def model_and_layer(family: str) -> tuple[PreTrainedModel, MoELayer]:
    """The model, and the first of its MoE layers."""
    model = build(family)
    return model, find_moe_layers(model)[0]


def rows_of(layer: MoELayer, experts: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Copies of some experts' tensors, by expert and name."""
    tensors = layer.rows()
    return {expert: {name: rows[expert].detach().clone() for name, rows in tensors.items()} for expert in experts}


class Recorded:
    """What a layer's `call` hands to the runtime: its arguments, computed group by group."""

    def __init__(self, layer: MoELayer, size: int = 2) -> None:
        self.layer = layer
        self.size = size
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def needed(self) -> list[int]:
        """The experts of the last call that have weights."""
        return [int(expert) for expert in self.calls[-1][1].unique() if expert < self.layer.num_experts]

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls.append((hidden, index, weights))
        latest_first = self.needed[::-1]
        groups = [latest_first[start : start + self.size] for start in range(0, len(latest_first), self.size)]
        return LayerCall(self.layer, hidden, index, weights).run_groups(rows_of(self.layer, group) for group in groups)


def routing(layer: MoELayer, tokens: int = 6, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random `hidden[T, H]`, `index[T, K]` without repetition, `weights[T, K]`."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 64, generator=generator)
    index = torch.rand(tokens, layer.num_ids, generator=generator).topk(top_k).indices
    return hidden, index, torch.rand(tokens, top_k, generator=generator)
