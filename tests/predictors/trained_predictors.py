"""Trained predictors with random weights, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from promoe.predictors import PredictorContext
from promoe.predictors.trained import TrainedConfig, TrainedPredictor

LAYERS, HIDDEN, EXPERTS, TOP_K, LOOKAHEAD = 4, 16, 8, 2, 3


def make(kind: str = "residual", seed: int = 0, **changes: Any) -> TrainedPredictor:
    """Every weight random, inputs standardised, calibrated somehow."""
    fields: dict[str, Any] = {
        "kind": kind,
        "model_type": "qwen2_moe",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "lookahead": LOOKAHEAD,
        "width": 12,
        "base_model": "demo/model",
    }
    predictor = TrainedPredictor(TrainedConfig(**fields | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in predictor.parameters():
            tensor.normal_(std=0.5, generator=generator)
        shape = predictor.network.mean.shape
        predictor.network.standardise(
            torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) + 0.5
        )
        predictor.slope.uniform_(0.5, 2.0, generator=generator)
        predictor.offset.normal_(generator=generator)
    return predictor


def sizes_of(context: PredictorContext) -> dict[str, Any]:
    """What `make` needs to know of a model."""
    return {
        "model_type": context.model_type,
        "num_layers": context.num_layers,
        "hidden_size": context.hidden_size,
        "num_experts": context.num_experts[0],
        "top_k": context.top_k[0],
    }


class Gate(nn.Module):
    """A gate's weight and nothing else."""

    def __init__(self, num_experts: int = EXPERTS, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
