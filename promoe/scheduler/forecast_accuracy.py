"""Measures how many of the experts that a visit needed its forecasts had named.

`promoe-train evaluate` measures the same on recorded traces. If the visit needed n experts, the forecast's n most
probable ones are those it named. This judges the predictor's own probabilities: neither the calibration nor whether
anything is fetched matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import Observer
from .reuse import Floats

# Outcomes that are scored at once. A forward waits for this, and the first of several takes as long as all the others.
BATCH_OUTCOMES = 16


class ForecastAccuracy:
    """Scores forecasts once their visit has come.

    Args:
        observer: is told each score.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._open: dict[int, dict[int, Floats]] = {}  # layer -> steps ahead -> the latest forecast of its next visit
        self._outcomes: list[tuple[int, Floats, Sequence[int]]] = []  # not scored yet

    def forecast(self, layer_idx: int, steps_ahead: int, probabilities: Floats) -> None:
        """Remember a forecast `[num_experts]` of a layer's next visit, which is `steps_ahead` layer visits away."""
        if len(self._outcomes) >= BATCH_OUTCOMES:
            self.score()
        self._open.setdefault(layer_idx, {})[steps_ahead] = probabilities.copy()  # a predictor may reuse its own

    def visited(self, layer_idx: int, ids: Sequence[int] | None) -> None:
        """Remember which distinct experts a layer's visit used; None: drop the forecasts of it.

        A forward waits for this, so they are scored later, many at once.
        """
        for steps_ahead, probabilities in self._open.pop(layer_idx, {}).items():
            if ids:
                self._outcomes.append((steps_ahead, probabilities, ids))

    def score(self) -> None:
        """Tell the observer the scores of all forecasts whose visit has come."""
        for steps_ahead, probabilities, ids in self._outcomes:
            needed, num_experts = len(ids), len(probabilities)
            most_probable = np.argpartition(probabilities, num_experts - needed)[num_experts - needed :]
            named = len(set(most_probable.tolist()).intersection(ids))
            self._observer.forecast_scored(steps_ahead, needed, named, needed * needed / num_experts)
        self._outcomes.clear()
