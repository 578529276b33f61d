"""Small recorded traces with hidden states, and trained predictors that were never trained, made up for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from promoe.predictors.trained import TrainedConfig, TrainedPredictor
from promoe.training.recorded_traces import RecordedTrace, TraceWriter
from promoe.training.trace_folder import GATES_FILE, Rows, TraceInfo

LAYERS, HIDDEN, EXPERTS, TOP_K = 3, 6, 5, 2


def write_trace(
    folder: Path,
    gate_inputs: Sequence[torch.Tensor],
    gates: Sequence[Mapping[str, torch.Tensor]],
    experts: Sequence[torch.Tensor],
    generated: int = 0,
    num_experts: int = EXPERTS,
) -> RecordedTrace:
    """A recorded trace of these prompts, as `collect` writes it.

    Args:
        folder: where to.
        gate_inputs: of each prompt `[n, L, H]`.
        gates: tensors of each layer's gate.
        experts: of each prompt `[n, L, top_k]`.
        generated: last tokens of each prompt that the model wrote.
        num_experts: of each layer.
    """
    _, layers, hidden = gate_inputs[0].shape
    info = TraceInfo(
        "org/model", None, "qwen2_moe", hidden, [num_experts] * layers, [experts[0].shape[-1]] * layers, {"seed": 0}
    )
    writer = TraceWriter(folder, info)
    for prompt, (inputs, chosen) in enumerate(zip(gate_inputs, experts, strict=True)):
        n = len(inputs)
        writer.append(
            [
                Rows(
                    prompt=prompt,
                    phase=np.repeat([0, 1], [n - generated, generated]),
                    token_ids=np.arange(n, dtype=np.int32) % 7,
                    gate_inputs=inputs.bfloat16(),
                    gate_logits=np.zeros((n, layers * num_experts), np.float32),
                    experts=chosen.reshape(n, -1).numpy().astype(np.int16),
                )
            ]
        )
        if prompt % 2:
            writer.flush()  # several parts
    writer.flush()
    tensors = {f"{i}.{name}": tensor.contiguous() for i, gate in enumerate(gates) for name, tensor in gate.items()}
    save_file(tensors, folder / GATES_FILE)
    return RecordedTrace(folder)


def random_trace(folder: Path, prompts: int = 10, length: int = 8, seed: int = 0) -> RecordedTrace:
    """Hidden states drift slowly from layer to layer and are routed by random gates; half of each prompt is generated."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=generator)
    states, experts = [], []
    for _ in range(prompts):
        drift = torch.randn(length, LAYERS, HIDDEN, generator=generator) * torch.tensor([1.0, 0.3, 0.3])[:, None]
        inputs = drift.cumsum(dim=1).bfloat16().float()
        states.append(inputs)
        experts.append(torch.einsum("nlh,leh->nle", inputs, weights).topk(TOP_K).indices)
    return write_trace(folder, states, [{"weight": weight} for weight in weights], experts, generated=length // 2)


def make_config(**changes: Any) -> TrainedConfig:
    fields: dict[str, Any] = {
        "kind": "residual",
        "model_type": "qwen2_moe",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "lookahead": 2,
        "width": 4,
        "base_model": "org/model",
    }
    return TrainedConfig(**fields | changes)


def random_predictor(seed: int = 0, **changes: Any) -> TrainedPredictor:
    """All its weights random, standardisation and calibration too."""
    generator = torch.Generator().manual_seed(seed)
    predictor = TrainedPredictor(make_config(**changes))
    with torch.no_grad():
        for tensor in predictor.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for positive in (predictor.slope, predictor.network.scale):
            positive.copy_(positive.abs() + 0.1)
    return predictor


def save_run(folder: Path, seed: int = 0, num_tokens: int | None = None, **changes: Any) -> Path:
    """A run of `fit`: its predictor, and, if a number of tokens is given, its settings."""
    random_predictor(seed, **changes).save_pretrained(folder / "predictor")
    if num_tokens is not None:
        (folder / "fit.json").write_text(json.dumps({"num_tokens": num_tokens}))
    return folder
