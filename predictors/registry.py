"""The predictors that need no training, by name."""

from __future__ import annotations

from collections.abc import Callable

from promoe.errors import ConfigError

from .base import Predictor, PredictorContext
from .gate import GatePredictor
from .history import PopularityPredictor, PreviousPredictor
from .reference import RandomPredictor

KINDS: dict[str, Callable[[PredictorContext, int], Predictor]] = {
    "gate": GatePredictor,
    "previous": PreviousPredictor,
    "popularity": PopularityPredictor,
    "random": RandomPredictor,
}


def check_kind(kind: str) -> None:
    """Raise ConfigError if there is no predictor of that name."""
    if kind not in KINDS:
        raise ConfigError(
            f"The 'predictor' argument must be None, a Predictor, or one of {', '.join(map(repr, KINDS))}. "
            f"Got {kind!r} instead."
        )


def create(kind: str, context: PredictorContext, lookahead: int) -> Predictor:
    """The predictor of that name for a model.

    Raises:
        ConfigError: there is none of that name.
    """
    check_kind(kind)
    return KINDS[kind](context, lookahead)
