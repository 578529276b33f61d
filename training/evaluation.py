"""How good predictions are, in the terms that matter: which experts, and which of those that a cache does not hold.

Layer j at lookahead k is predicted from what is known at layer max(0, j - k), and layer 0 only by kinds that know before
the token begins. Definitions, for a prediction of the top-k experts of each held-out token and layer, and its scores:

accuracy: share of the experts used that are among the predicted (the paper's ACCURACY); mean over layers.
exact: share of tokens whose experts of a layer are all predicted; mean over layers.
coverage error: how many experts, in the order of their scores, must be fetched to have all that are used; mean over layers.
next-token accuracy: accuracy of layers j < k, predicted from layer L + j - k of the token before, in the same prompt.
Brier score: mean squared difference of the probability given and what happened (0 or 1).
calibration curve: mean probability and share used, in ten equal ranges of the probability.
miss recall: share of the *absent* experts used that are among the predicted; only those cost anything.
miss precision: share of the predicted absent experts, which a prefetch would fetch, that are used.
FETCHRATE: share of the predicted absent experts, m per layer visit on average, that arrive within k layers:
    min(1, k * layer_seconds * bandwidth / (expert_bytes * m)).
GOODPRED: ACCURACY x FETCHRATE (ProMoE section 3).

All are also given for prefill and decode alone, where the trace knows which tokens the model wrote itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from promoe.scheduler.config import EvictionName
from promoe.training.measures import Bools, Caches, Figures, Transfer, top
from promoe.training.replayed import residency
from promoe.training.routing_traces import RoutingTrace
from promoe.training.tables import Kind, spread, used

# Outcomes (token, layer, expert) from which calibration is judged.
CALIBRATION_OUTCOMES = 500_000


def evaluate(
    kinds: Mapping[str, Callable[[], Kind]],
    held_out: RoutingTrace,
    lookaheads: Sequence[int],
    caches: Caches,
    transfer: Transfer | None = None,
) -> dict[str, Any]:
    """Evaluate kinds at several lookaheads.

    Args:
        kinds: by name; each is fitted when its turn comes.
        held_out: prompts that they are not fitted on.
        lookaheads: layers between what is known and what is predicted.
        caches: for miss recall and precision.
        transfer: for FETCHRATE and GOODPRED.

    Returns:
        `{kind: {"1": {figures, "prefill": {figures}, "decode": {figures}}}}`, where figures are `"accuracy", "exact",
        "coverage_error", "next_token_accuracy"`, the same per layer in `"layers", "exact_layers",
        "coverage_error_layers", "next_token_layers"`, `"calibration": {"brier", "layers", "predicted", "observed"}` and
        `"misses": {policy: {"12.5%": {"recall", "precision", "predicted_per_visit", "fetch_rate", "goodpred"}}}`. None
        where there is nothing to divide by, or nothing is predicted or known.
    """
    result: dict[str, Any] = {}
    for name, fitted in kinds.items():
        kind = fitted()
        asked = lookaheads[:1] if kind.same_for_every_lookahead else lookaheads
        judged = {lookahead: _judge(name, kind, held_out, lookahead, caches) for lookahead in asked}
        result[name] = {
            str(lookahead): _to_json(judged.get(lookahead, judged[asked[0]]), lookahead, transfer)
            for lookahead in lookaheads
        }
    return result


def replay_caches(held_out: RoutingTrace, policies: Sequence[EvictionName], rates: Sequence[float]) -> Caches:
    """`residency` of the held-out tokens under each policy at each cache rate."""
    return {(policy, rate): residency(held_out, policy, rate) for policy in policies for rate in rates}


Parts = dict[str, Figures]
"""All held-out tokens under "all", and, where they are known and there are any, "prefill" and "decode"."""


def _judge(name: str, kind: Kind, held_out: RoutingTrace, lookahead: int, caches: Caches) -> Parts:
    parts = {part: Figures(tokens, held_out.num_layers, caches) for part, tokens in _tokens_of_parts(held_out).items()}
    num_outcomes = held_out.num_layers * held_out.num_experts
    sample = spread(held_out.num_tokens, max(1, CALIBRATION_OUTCOMES // num_outcomes))
    continues = np.ones(held_out.num_tokens, dtype=np.bool_)
    continues[held_out.prompt_starts] = False
    layers = tqdm(range(held_out.num_layers), f"judge {name}, k = {lookahead}", unit="layer", disable=None, leave=False)
    for layer_idx in layers:
        needed = used(held_out, layer_idx) > 0
        scores = kind.scores(held_out, layer_idx, lookahead)
        if scores is not None:
            predicted = top(scores, held_out.top_k)
            probabilities = kind.probabilities(scores[sample], layer_idx, lookahead)
            for figures in parts.values():
                figures.add(layer_idx, scores, predicted, needed)
                if probabilities is not None:
                    figures.add_probabilities(layer_idx, sample, probabilities, needed)
        of_next = kind.next_token_scores(held_out, layer_idx, lookahead) if layer_idx < lookahead else None
        if of_next is not None:
            predicted = np.roll(top(of_next, held_out.top_k), 1, axis=0)
            for figures in parts.values():
                figures.add_next_token(layer_idx, continues, predicted, needed)
    return parts


def _tokens_of_parts(trace: RoutingTrace) -> dict[str, Bools | None]:
    if trace.generated is None:
        return {"all": None}
    phases = {"prefill": ~trace.generated, "decode": trace.generated}
    return {"all": None} | {phase: tokens for phase, tokens in phases.items() if tokens.any()}


def _to_json(parts: Parts, lookahead: int, transfer: Transfer | None) -> dict[str, Any]:
    figures = {part: figures.to_json(lookahead, transfer) for part, figures in parts.items()}
    return figures["all"] | {phase: figures.get(phase) for phase in ("prefill", "decode")}
