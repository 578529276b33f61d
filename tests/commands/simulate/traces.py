"""Routing traces made up for simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from promoe.training.routing_traces import RoutingTrace

LAYERS, EXPERTS, TOP_K = 4, 16, 3


def topics(seed: int = 0, prompts: int = 12, length: int = 40, generated: bool = False) -> RoutingTrace:
    """Tokens of a topic share experts; topics last for some tokens."""
    rng = np.random.default_rng(seed)
    favourites = rng.permuted(np.tile(np.arange(EXPERTS), (6, LAYERS, 1)), axis=2)[:, :, : 2 * TOP_K]
    total = prompts * length
    topic = np.repeat(rng.integers(0, 6, total), rng.integers(2, 20, total))[:total]
    experts = np.stack([rng.permuted(favourites[t], axis=1)[:, :TOP_K] for t in topic])
    phase = np.tile(np.arange(length) >= 10, prompts) if generated else None
    return RoutingTrace(experts, topic, np.full(prompts, length), EXPERTS, phase)


def save(trace: RoutingTrace, path: Path, **changes: Any) -> Path:
    """As an archive of ids, with other arrays in place of some."""
    arrays = {"experts": trace.experts, "prompt_lengths": trace.prompt_lengths, "token_index": trace.token_ids}
    np.savez(path, **(arrays | changes))
    return path
