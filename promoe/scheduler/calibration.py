"""What a forecast is worth, learned while running.

A predictor's probabilities may be optimistic, about the wrong token, or noise. Per lookahead, one logistic model
joins the forecast with the reuse prior, `logit p = a * logit f + b * logit p_r + c`, and is refitted by a decayed
Newton step from the outcomes of visits. A perfect forecast drives a up; noise drives a to 0 and b to 1, after which
the forecast changes nothing: what it names is fetched only if its own past makes it likely enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .reuse import P_MAX, P_MIN, Floats

# Weight of the starting coefficients, in outcomes (one per expert and visit), and memory of the fit, in visits.
START_WEIGHT = 40.0
MEMORY_VISITS = 500.0
# Visits per refit: one costs about 40 us, on the critical path.
BATCH_VISITS = 8
# Bound of the coefficients: keeps a freak stretch of outcomes from turning into certainty.
MAX_COEFFICIENT = 4.0


def _features(forecast: Floats, prior: Floats) -> Floats:
    """`[3, num_experts]`: log odds of both, clamped to probabilities in [0.001, 0.999], and ones."""
    features = np.ones((3, len(forecast)))
    odds = features[:2]
    odds[0] = forecast
    odds[1] = prior
    np.maximum(odds, P_MIN, out=odds)
    np.minimum(odds, P_MAX, out=odds)
    odds /= 1.0 - odds
    np.log(odds, out=odds)
    return features


class _Fit:
    """One lookahead's coefficients (forecast, prior, constant) and the decayed information matrix behind them."""

    def __init__(self) -> None:
        self.coefficients = np.array([0.5, 0.5, 0.0])
        self._information = np.eye(3) * START_WEIGHT
        self._batch: list[tuple[Floats, Sequence[int]]] = []

    def probability(self, features: Floats) -> Floats:
        """Of use, `[num_experts]`, for features `[3, num_experts]`."""
        p: Floats = 1.0 / (1.0 + np.exp(-(self.coefficients @ features)))
        return p

    def learn(self, features: Floats, ids: Sequence[int]) -> None:
        """A visit that had these features used these experts; takes effect once a batch is full."""
        self._batch.append((features, ids))
        if len(self._batch) == BATCH_VISITS:
            self._refit()
            self._batch.clear()

    def _refit(self) -> None:
        features = np.concatenate([visit for visit, _ in self._batch], axis=1)
        error = -self.probability(features)
        weights = -error * (1.0 + error)
        start = 0
        for visit, ids in self._batch:
            error[[start + expert_idx for expert_idx in ids]] += 1.0
            start += visit.shape[1]
        self._information *= (1.0 - 1.0 / MEMORY_VISITS) ** len(self._batch)
        self._information += (features * weights) @ features.T
        step = np.linalg.solve(self._information + np.eye(3), features @ error)
        self.coefficients = np.clip(self.coefficients + step, -MAX_COEFFICIENT, MAX_COEFFICIENT)


class Calibration:
    """Turns raw forecasts into probabilities that can be weighed against the reuse prior."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}
        self._open: dict[int, dict[int, Floats]] = {}  # layer -> lookahead -> features of its latest forecast

    def calibrate(self, layer_idx: int, steps_ahead: int, forecast: Floats, prior: Floats) -> Floats:
        """Probabilities `[num_experts]` of use at the layer's next visit; remembered until `observe`."""
        features = _features(forecast, prior)
        self._open.setdefault(layer_idx, {})[steps_ahead] = features
        return self._fit(steps_ahead).probability(features)

    def observe(self, layer_idx: int, ids: Sequence[int] | None) -> None:
        """The layer was visited with these experts: score the forecasts that were open for it; None: drop them."""
        for steps_ahead, features in self._open.pop(layer_idx, {}).items():
            if ids is not None:
                self._fit(steps_ahead).learn(features, ids)

    def coefficients(self, steps_ahead: int) -> tuple[float, float, float]:
        """(a, b, c) of a lookahead, for reports."""
        a, b, c = self._fit(steps_ahead).coefficients
        return float(a), float(b), float(c)

    def _fit(self, steps_ahead: int) -> _Fit:
        fit = self._fits.get(steps_ahead)
        if fit is None:
            fit = self._fits[steps_ahead] = _Fit()
        return fit
