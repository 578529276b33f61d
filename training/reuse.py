"""Fits the reuse prior of a model: it learns from a trace what it would otherwise learn while serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from promoe.scheduler.online_models import LogOdds
from promoe.scheduler.reuse import LearnedReuse, ReusePrior
from promoe.training.routing_traces import RoutingTrace

if TYPE_CHECKING:
    from promoe.predictors.trained import TrainedPredictor

# After so many tokens, what the prior learns has settled.
MAX_TOKENS = 20_000
# Hidden states are read a block of so many tokens at a time.
BLOCK_TOKENS = 512


def fit_reuse(
    trace: RoutingTrace, num_experts: int | None = None, predictor: TrainedPredictor | None = None
) -> LearnedReuse:
    """Return what a reuse prior learns from the last tokens of a trace, one by one.

    The last ones, because the prompts at the end validate a predictor. What it was trained on, it would foresee too well.

    Args:
        trace: a trace of the model.
        num_experts: experts of each layer, if the trace may not have used all; None: as the trace says.
        predictor: if it foresees reuse, the prior also learns how much that is worth. The trace must have hidden states.
    """
    foreseeing = predictor if predictor is not None and predictor.config.foresees_reuse else None
    trace = trace.last(MAX_TOKENS)
    num_experts = num_experts or trace.num_experts
    unlearned = None if foreseeing is None else LearnedReuse.foreseeing(foreseeing.typical_reuse())
    prior = ReusePrior(trace.num_layers, num_experts, learned=unlearned)
    with tqdm(total=trace.num_tokens, desc="fit reuse", unit="token", disable=None, leave=False) as progress:
        for start in range(0, trace.num_tokens, BLOCK_TOKENS):
            block = trace.tokens(slice(start, min(start + BLOCK_TOKENS, trace.num_tokens)))
            foreseen = None if foreseeing is None else _foreseen(foreseeing, block)
            for token_idx, layer_idx, ids in block.visits():
                if foreseen is not None:
                    prior.foresee(layer_idx, foreseen[layer_idx, token_idx], begun=False)
                prior.observe(layer_idx, [ids])
            progress.update(block.num_tokens)
    return prior.learned()


def _foreseen(predictor: TrainedPredictor, block: RoutingTrace) -> LogOdds:
    """Return the log odds `[num_layers, num_tokens, num_experts]` of reuse after each token."""
    import torch

    assert block.recorded is not None, "there is nothing to foresee from"
    rows = slice(block.first_row, block.first_row + block.num_tokens)
    with torch.inference_mode():
        log_odds: LogOdds = predictor.reuse_log_odds(block.recorded.gate_inputs(rows)).numpy()
    return log_odds
