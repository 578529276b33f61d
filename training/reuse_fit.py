"""Fits the reuse prior of a model: it learns from the routing of some prompts what it would otherwise learn while serving."""

from __future__ import annotations

from tqdm.auto import tqdm

from promoe.scheduler.reuse import LearnedReuse, ReusePrior
from promoe.training.routing_traces import RoutingTrace

# Enough for what it learns to settle.
MAX_TOKENS = 20_000


def fit_reuse(trace: RoutingTrace, num_experts: int | None = None) -> LearnedReuse:
    """What a reuse prior learns from the first tokens of a trace, one by one.

    Args:
        trace: of the model.
        num_experts: of each layer, where the trace may not have used the last ones.
    """
    prior = ReusePrior(trace.num_layers, num_experts or trace.num_experts)
    trace = trace.first(MAX_TOKENS)
    total = trace.num_tokens * trace.num_layers
    for _, layer_idx, ids in tqdm(trace.visits(), "fit reuse", total, unit="visit", disable=None, leave=False):
        prior.observe(layer_idx, [ids])
    return prior.learned()
