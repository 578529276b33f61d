"""What a forecast is worth, learned while running.

A predictor's probabilities may be optimistic, about the wrong token, or noise. Per lookahead, one logistic model
joins the forecast with the reuse prior, `logit p = a * logit f + b * logit p_r + c`, and is refitted by a decayed
Newton step from each visit's outcome. A perfect forecast drives a up; noise drives a to 0 and b to 1, after which the
forecast changes nothing and, being no more probable than the prior says, is not fetched either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .reuse import P_MAX, P_MIN, Floats

# Weight of the starting coefficients, in outcomes (one per expert and visit), and memory of the fit, in visits.
START_WEIGHT = 40.0
MEMORY_VISITS = 500.0
# Bound of the coefficients: keeps a freak stretch of outcomes from turning into certainty.
MAX_COEFFICIENT = 4.0


def logit(probability: Floats) -> Floats:
    """Log odds, of probabilities clamped to [0.001, 0.999]."""
    p = np.clip(probability, P_MIN, P_MAX)
    odds: Floats = np.log(p / (1.0 - p))
    return odds


class _Fit:
    """One lookahead's coefficients (forecast, prior, constant) and the decayed information matrix behind them."""

    def __init__(self) -> None:
        self.coefficients = np.array([0.5, 0.5, 0.0])
        self._information = np.eye(3) * START_WEIGHT

    def probability(self, features: Floats) -> Floats:
        p: Floats = 1.0 / (1.0 + np.exp(-(features @ self.coefficients)))
        return p

    def learn(self, features: Floats, used: Floats) -> None:
        predicted = self.probability(features)
        weights = predicted * (1.0 - predicted)
        self._information *= 1.0 - 1.0 / MEMORY_VISITS
        self._information += features.T @ (features * weights[:, None])
        step = np.linalg.solve(self._information + np.eye(3), features.T @ (used - predicted))
        self.coefficients = np.clip(self.coefficients + step, -MAX_COEFFICIENT, MAX_COEFFICIENT)


class Calibration:
    """Turns raw forecasts into probabilities that can be weighed against the reuse prior."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}
        self._open: dict[int, dict[int, Floats]] = {}  # layer -> lookahead -> features of its latest forecast

    def calibrate(self, layer_idx: int, steps_ahead: int, forecast: npt.ArrayLike, prior: Floats) -> Floats:
        """Probabilities `[num_experts]` of use at the layer's next visit; remembered until `observe`."""
        raw = np.asarray(forecast, dtype=np.float64)
        features = np.stack([logit(raw), logit(prior), np.ones_like(prior)], axis=1)
        self._open.setdefault(layer_idx, {})[steps_ahead] = features
        return self._fit(steps_ahead).probability(features)

    def observe(self, layer_idx: int, ids: Sequence[int]) -> None:
        """The layer was visited with these experts: score the forecasts that were open for it."""
        for steps_ahead, features in self._open.pop(layer_idx, {}).items():
            used = np.zeros(len(features))
            used[list(ids)] = 1.0
            self._fit(steps_ahead).learn(features, used)

    def coefficients(self, steps_ahead: int) -> tuple[float, float, float]:
        """(a, b, c) of a lookahead, for reports."""
        a, b, c = self._fit(steps_ahead).coefficients
        return float(a), float(b), float(c)

    def _fit(self, steps_ahead: int) -> _Fit:
        return self._fits.setdefault(steps_ahead, _Fit())
