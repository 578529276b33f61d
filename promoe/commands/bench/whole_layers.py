"""Naive offloading: a layer reads all its experts, whichever its tokens use."""

from __future__ import annotations

from typing import Any

from promoe.transfer.engine import Engine
from promoe.transfer.engine.visit import EngineVisit


def read_whole_layers(engine: Engine) -> None:
    """Make every visit of an engine need all experts of its layer, for as long as the engine lives.

    The counters then count all of them as needed.
    """
    begin, num_experts = engine.visit, engine.scheduler.config.num_experts

    def visit(layer_idx: int, ids: Any, tokens: Any, num_sequences: int, hits: Any, phase: Any) -> EngineVisit:
        everything = range(num_experts[layer_idx])
        return begin(layer_idx, list(everything), tokens, num_sequences, hits=None, phase=phase)

    engine.visit = visit  # type: ignore[assignment, method-assign]
