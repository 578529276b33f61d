"""How many of the experts that a visit needed its forecasts had named.

The same measure as `promoe-train evaluate` takes of recorded traces, taken while running: of a forecast, as many of the most
probable experts as the visit needed are the named ones. It judges the predictor's own probabilities: what a calibration
makes of them, and whether anything is fetched, does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import Observer
from .reuse import Floats

# Outcomes that are scored at once: a forward waits for this, and the first of some takes as long as all the others.
BATCH_OUTCOMES = 16


class Accuracy:
    """Scores forecasts once their visit has come.

    Args:
        observer: is told each score.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._open: dict[int, dict[int, Floats]] = {}  # layer -> steps ahead -> the latest forecast of its next visit
        self._outcomes: list[tuple[int, Floats, Sequence[int]]] = []  # not scored yet

    def forecast(self, layer_idx: int, steps_ahead: int, probabilities: Floats) -> None:
        """A forecast of the layer's next visit, `[num_experts]`, came so many visits before it."""
        if len(self._outcomes) >= BATCH_OUTCOMES:
            self.score()
        self._open.setdefault(layer_idx, {})[steps_ahead] = probabilities.copy()  # a predictor may reuse its own

    def visited(self, layer_idx: int, ids: Sequence[int] | None) -> None:
        """The layer was visited with these distinct experts; None: drop what was forecast of it.

        A forward waits for this; so the counting is done later, of many at once.
        """
        for steps_ahead, probabilities in self._open.pop(layer_idx, {}).items():
            if ids:
                self._outcomes.append((steps_ahead, probabilities, ids))

    def score(self) -> None:
        """Tell the observer of all whose visit has come."""
        for steps_ahead, probabilities, ids in self._outcomes:
            needed, num_experts = len(ids), len(probabilities)
            most_probable = np.argpartition(probabilities, num_experts - needed)[num_experts - needed :]
            named = len(set(most_probable.tolist()).intersection(ids))
            self._observer.forecast_scored(steps_ahead, needed, named, needed * needed / num_experts)
        self._outcomes.clear()
