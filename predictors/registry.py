"""Predictors by name: those that need no training, and trained ones by folder or hub id."""

from __future__ import annotations

import os
from collections.abc import Callable

from promoe.errors import ConfigError

from .base import Predictor, PredictorContext
from .correlation import CorrelationPredictor
from .folded import FoldedPredictor
from .gate import GatePredictor
from .history import PopularityPredictor, PreviousPredictor
from .reference import RandomPredictor
from .trained import TrainedPredictor

KINDS: dict[str, Callable[[PredictorContext, int], Predictor]] = {
    "gate": GatePredictor,
    "correlation": CorrelationPredictor,
    "previous": PreviousPredictor,
    "popularity": PopularityPredictor,
    "random": RandomPredictor,
}


def check_kind(kind: str) -> None:
    """Raise ConfigError if there is no predictor of that name, or no trained one in that folder or hub id."""
    if kind in KINDS:
        return
    if _names_a_place(kind):
        TrainedPredictor.load(kind)
        return
    raise ConfigError(
        "The 'predictor' argument must be None (--predictor none), a Predictor, one of "
        f"{', '.join(map(repr, KINDS))}, or the folder or hub id of a trained one. Got {kind!r} instead."
    )


def create(kind: str, context: PredictorContext, lookahead: int) -> Predictor:
    """Make a predictor for a model.

    Args:
        kind: one of `KINDS`, or the folder or hub id of a trained predictor.
        context: the model.
        lookahead: how many layer visits ahead it forecasts.

    Raises:
        ConfigError: there is no such predictor, or it was trained for another model.
    """
    if kind not in KINDS and _names_a_place(kind):
        return FoldedPredictor(TrainedPredictor.load(kind), context, lookahead)
    check_kind(kind)
    return KINDS[kind](context, lookahead)


def _names_a_place(text: str) -> bool:
    return "/" in text or os.path.isdir(text)
