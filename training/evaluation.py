"""How good predictions are, in the terms that matter: which experts, and which of those that a cache does not hold.

Definitions, for a prediction of the top-k experts of each held-out token and layer:

accuracy: share of the experts used that are among the predicted (the paper's measure).
miss recall: share of the *absent* experts used that are among the predicted; only those cost anything.
miss precision: share of the predicted absent experts, which a prefetch would fetch, that are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from promoe.errors import PromoeError
from promoe.scheduler.config import EvictionName
from promoe.training.replayed import residency
from promoe.training.routing_traces import RoutingTrace
from promoe.training.tables import KINDS, Kind, used

Bools = npt.NDArray[np.bool_]
Caches = Mapping[tuple[EvictionName, float], Bools]
"""(policy, cache rate) -> `residency` of the held-out tokens, or of the first of them."""


class UnknownKindError(PromoeError):
    """There is no predictor of that name that needs ids only."""


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise UnknownKindError if one of them is none that predicts from ids."""
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownKindError(
                f"There is no kind {kind!r} that predicts from a trace of ids. Choose from {', '.join(KINDS)}."
            )


def evaluate(
    fit: RoutingTrace, held_out: RoutingTrace, kinds: Sequence[str], lookaheads: Sequence[int], caches: Caches
) -> dict[str, Any]:
    """Evaluate kinds at several lookaheads.

    Args:
        fit: prompts to learn from.
        held_out: other prompts.
        kinds: names in `tables.KINDS`.
        lookaheads: layers between what is known and what is predicted.
        caches: for miss recall and precision.

    Returns:
        `{kind: {"1": {"accuracy":, "layers": [...], "misses": {policy: {"12.5%": {"recall":, "precision":}}}}}}`; None
        where there is nothing to divide by.

    Raises:
        UnknownKindError: a kind that is none of those.
    """
    check_kinds(kinds)
    result: dict[str, Any] = {}
    for name in kinds:
        kind = KINDS[name](fit)
        if kind.same_for_every_lookahead:
            figures = [_evaluate(kind, held_out, lookaheads[0], caches)] * len(lookaheads)
        else:
            figures = [_evaluate(kind, held_out, lookahead, caches) for lookahead in lookaheads]
        result[name] = dict(zip(map(str, lookaheads), figures, strict=True))
    return result


def replay_caches(held_out: RoutingTrace, policies: Sequence[EvictionName], rates: Sequence[float]) -> Caches:
    """`residency` of the held-out tokens under each policy at each cache rate."""
    return {(policy, rate): residency(held_out, policy, rate) for policy in policies for rate in rates}


class _Misses:
    """Counts over layers: absent experts that were used, predicted, and both."""

    def __init__(self) -> None:
        self.used = self.predicted = self.both = 0

    def add(self, absent: Bools, needed: Bools, predicted: Bools) -> None:
        self.used += int(np.count_nonzero(absent & needed))
        self.predicted += int(np.count_nonzero(absent & predicted))
        self.both += int(np.count_nonzero(absent & needed & predicted))

    def to_json(self) -> dict[str, float | None]:
        return {"recall": _share(self.both, self.used), "precision": _share(self.both, self.predicted)}


def _evaluate(kind: Kind, held_out: RoutingTrace, lookahead: int, caches: Caches) -> dict[str, Any]:
    accuracies: list[float | None] = []
    misses = {cache: _Misses() for cache in caches}
    for layer_idx in range(held_out.num_layers):
        scores = kind.scores(held_out, layer_idx, lookahead)
        if scores is None:
            accuracies.append(None)
            continue
        predicted, needed = top(scores, held_out.top_k), used(held_out, layer_idx) > 0
        accuracies.append(float(np.count_nonzero(predicted & needed) / np.count_nonzero(needed)))
        for cache, held in caches.items():
            tokens = len(held)
            misses[cache].add(~held[:, layer_idx], needed[:tokens], predicted[:tokens])
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    by_policy: dict[str, dict[str, Any]] = {}
    for (policy, rate), counts in misses.items():
        by_policy.setdefault(policy, {})[name_of_rate(rate)] = counts.to_json()
    return {"accuracy": float(np.mean(known)) if known else None, "layers": accuracies, "misses": by_policy}


def name_of_rate(rate: float) -> str:
    """A cache rate as the results call it: "12.5%"."""
    return f"{rate * 100:g}%"


def top(scores: npt.NDArray[np.float32], count: int) -> Bools:
    """The `count` largest of each row, as a mask of the same shape; of equal ones, the lower ids."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    mask = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
