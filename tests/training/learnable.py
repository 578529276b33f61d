"""A recorded trace in which there is something to learn: each layer turns the hidden state a little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from promoe.training.options import Fit, TrainerOptions
from promoe.training.recorded_traces import TraceWriter
from promoe.training.trace_folder import GATES_FILE, Rows, TraceInfo

LAYERS, HIDDEN, EXPERTS, TOP_K = 3, 16, 6, 2


def write_trace(folder: Path, prompts: int = 30, length: int = 20, seed: int = 0) -> Path:
    """Half of each prompt generated; gates saved as `collect` does."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=generator)
    skew = torch.randn(HIDDEN, HIDDEN, generator=generator)
    turn = torch.linalg.matrix_exp(0.15 * (skew - skew.T))
    info = TraceInfo("demo/model", None, "qwen2_moe", HIDDEN, [EXPERTS] * LAYERS, [TOP_K] * LAYERS, {})
    writer = TraceWriter(folder, info)
    for prompt in range(prompts):
        states = [torch.randn(length, HIDDEN, generator=generator)]
        for _ in range(LAYERS - 1):
            states.append(states[-1] @ turn + 0.1 * torch.randn(length, HIDDEN, generator=generator))
        inputs = torch.stack(states, dim=1)
        logits = torch.einsum("nlh,leh->nle", inputs, gates)
        writer.append(
            [
                Rows(
                    prompt=prompt,
                    phase=np.repeat([0, 1], length // 2),
                    token_ids=np.arange(length, dtype=np.int32),
                    gate_inputs=inputs.bfloat16(),
                    gate_logits=logits.reshape(length, -1).numpy(),
                    experts=logits.topk(TOP_K).indices.reshape(length, -1).numpy().astype(np.int16),
                )
            ]
        )
    writer.flush()
    save_file({f"{idx}.weight": gate.contiguous() for idx, gate in enumerate(gates)}, folder / GATES_FILE)
    return folder


def make_fit(trace: Path, out: Path, max_epochs: int = 3, **changes: Any) -> Fit:
    """A fit of seconds."""
    fields: dict[str, Any] = {
        "trace": str(trace),
        "out": str(out),
        "kind": "residual",
        "loss": "ce_kl",
        "lookahead": 2,
        "width": 8,
        "learning_rate": 5e-3,
        "weight_decay": 0.01,
        "batch_size": 32,
        "patience": 5,
        "seed": 0,
        "trainer": TrainerOptions(max_epochs=max_epochs, accelerator="cpu"),
    }
    return Fit(**fields | changes)


def settings_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "fit.json").read_text())
    return result
