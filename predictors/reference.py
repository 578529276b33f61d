"""Predictors that know everything, nothing, or the opposite: bounds for measurements, and hostile input for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import Forecast, LayerVisit, PredictorContext, horizon


class RandomPredictor:
    """Uniformly random probabilities from a fixed seed."""

    quick = True

    def __init__(self, context: PredictorContext, lookahead: int, seed: int = 0) -> None:
        self._num_experts = context.num_experts
        self._lookahead = lookahead
        self._random = np.random.default_rng(seed)

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Return noise for each of the next layers."""
        steps = horizon(visit.layer_idx, self._lookahead, len(self._num_experts))
        return [Forecast(k, layer, self._random.random(self._num_experts[layer])) for k, layer in steps]


class OraclePredictor:
    """Knows the visits in advance, from a recorded run of the same tokens.

    Args:
        context: the model.
        lookahead: how many visits ahead it forecasts.
        visits: (layer, experts used) of every visit, in order.
        wrong: forecast the experts that will *not* be used, with certainty.
    """

    needs_every_visit = True  # it counts them, to know where in the run it is

    def __init__(
        self,
        context: PredictorContext,
        lookahead: int,
        visits: Sequence[tuple[int, Sequence[int]]],
        wrong: bool = False,
    ) -> None:
        self._num_experts = context.num_experts
        self._lookahead = lookahead
        self._visits = visits
        self._wrong = wrong
        self._position = -1

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Return the truth about the next visits, or its opposite."""
        self._position += 1
        forecasts = []
        for k in range(1, self._lookahead + 1):
            if self._position + k >= len(self._visits):
                break
            layer_idx, used = self._visits[self._position + k]
            truth = np.zeros(self._num_experts[layer_idx])
            truth[list(used)] = 1.0
            forecasts.append(Forecast(k, layer_idx, 1.0 - truth if self._wrong else truth))
        return forecasts
