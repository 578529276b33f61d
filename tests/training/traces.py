"""Small routing traces made up for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from promoe.training.routing_traces import RoutingTrace

LAYERS, EXPERTS, TOP_K = 4, 8, 2


def trace_of(rows: Any, token_ids: Any, prompt_lengths: Any, num_experts: int = EXPERTS) -> RoutingTrace:
    return RoutingTrace(np.array(rows), np.array(token_ids), np.array(prompt_lengths), num_experts)


def random_trace(seed: int = 0, prompts: int = 10, length: int = 12) -> RoutingTrace:
    """Each token id has its own experts in the first layer; a layer's are its predecessor's plus one, mod 8."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, 6, prompts * length)
    first = np.stack([token_ids, (token_ids + 3) % EXPERTS], axis=1)
    experts = np.stack([(first + layer_idx) % EXPERTS for layer_idx in range(LAYERS)], axis=1)
    return RoutingTrace(experts.astype(np.uint8), token_ids, np.full(prompts, length), EXPERTS)


def save(trace: RoutingTrace, path: Path, **changes: Any) -> Path:
    arrays = {
        "experts": trace.experts,
        "prompt_lengths": trace.prompt_lengths,
        "token_index": trace.token_ids,
        "token_strings": np.array(["a", "b"]),
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path
