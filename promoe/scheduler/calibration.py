"""What a forecast is worth, learned while running.

A predictor's probabilities may be optimistic, about the wrong token, or noise. Per lookahead, one logistic model joins
three opinions, `logit p = a * logit f + b * logit p_r + c * logit p_c + d`: the forecast f, the reuse prior p_r, and p_c,
how often the experts just chosen were followed by this one. It is refitted by a decayed Newton step from the outcomes
of visits, of all layers together and, as a deviation from that, of each layer by itself: noise is found out within a
token or two, and a layer for which forecasts are worth more or less than for others is known after some more. A perfect
forecast drives a up; noise drives a to 0, after which the forecast changes nothing: what it names is fetched only if the
past makes it likely enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .correlation import Correlation
from .newton import NewtonSteps
from .reuse import P_MAX, P_MIN, Floats

# Weight of the starting coefficients, in outcomes (one per expert and visit), and memory of the fit, in visits.
START_WEIGHT = 40.0
MEMORY_VISITS = 500.0
# Visits per refit, which may be on the critical path. A layer's own is refitted seldom, so that what all layers have in
# common is settled by then: two fits that correct the same error at once overshoot.
BATCH_VISITS = 8
LAYER_BATCH_VISITS = 32
# Of forecast, prior, correlation, and the constant. The prior is calibrated; a forecast has to earn its weight.
START_COEFFICIENTS = (0.3, 1.0, 0.0, 0.0)
# Bound of the coefficients: keeps a freak stretch of outcomes from turning into certainty.
MAX_COEFFICIENT = 4.0
# Farther ahead, what followed what says little, and every lookahead costs a table per layer.
CORRELATED_STEPS = 2


class Opinions(NamedTuple):
    """What was known when a forecast was made."""

    features: Floats
    """`[4, num_experts]`: log odds by forecast, prior and correlation, and ones."""
    correlation: Correlation | None
    chosen: Sequence[int]
    """By the layer forecast from."""


def _features(forecast: Floats, prior: Floats, correlated: npt.ArrayLike) -> Floats:
    """Log odds of probabilities that are clamped to [0.001, 0.999], and ones."""
    features = np.ones((4, len(forecast)))
    odds = features[:3]
    odds[0] = forecast
    odds[1] = prior
    odds[2] = correlated
    np.maximum(odds, P_MIN, out=odds)
    np.minimum(odds, P_MAX, out=odds)
    odds /= 1.0 - odds
    np.log(odds, out=odds)
    return features


class _Fit:
    """Coefficients that are learned in batches of visits.

    Args:
        coefficients: to start from.
        batch_visits: visits per refit.
        base: fitted as a deviation from this one's coefficients, whatever they become.
    """

    def __init__(self, coefficients: Sequence[float], batch_visits: int, base: _Fit | None = None) -> None:
        self._own = np.array(coefficients)
        self._base = base
        self._batch_visits = batch_visits
        self._steps = NewtonSteps(len(coefficients), START_WEIGHT, MEMORY_VISITS, ridge=1.0)
        self._batch: list[tuple[Floats, Sequence[int]]] = []

    @property
    def coefficients(self) -> Floats:
        """Of the features."""
        return self._own if self._base is None else self._own + self._base.coefficients

    def probability(self, features: Floats) -> Floats:
        """Of use, `[num_experts]`, for features `[4, num_experts]`."""
        p: Floats = self.coefficients.dot(features)
        np.negative(p, out=p)
        np.exp(p, out=p)
        p += 1.0
        np.divide(1.0, p, out=p)
        return p

    def learn(self, features: Floats, ids: Sequence[int]) -> None:
        """A visit that had these features used these experts; takes effect once a batch is full."""
        self._batch.append((features, ids))
        if len(self._batch) == self._batch_visits:
            self._refit()
            self._batch.clear()

    def _refit(self) -> None:
        features = np.concatenate([visit for visit, _ in self._batch], axis=1)
        expected = self.probability(features)
        error = -expected
        start = 0
        for visit, ids in self._batch:
            error[[start + expert_idx for expert_idx in ids]] += 1.0
            start += visit.shape[1]
        step = self._steps.step(features, expected, error, len(self._batch))
        self._own = np.clip(self._own + step, -MAX_COEFFICIENT, MAX_COEFFICIENT)


class Calibration:
    """Turns raw forecasts into probabilities that can be weighed against the reuse prior.

    Args:
        num_experts: of each layer.
    """

    def __init__(self, num_experts: Sequence[int]) -> None:
        self._num_experts = num_experts
        self._fits: dict[int, _Fit] = {}  # lookahead -> learned from all layers, and so at once
        self._layer_fits: dict[tuple[int, int], _Fit] = {}  # (layer, lookahead) -> what is special about the layer
        self._correlations: dict[tuple[int, int], Correlation] = {}  # (layer, lookahead)
        self._open: dict[int, dict[int, Opinions]] = {}  # layer -> lookahead -> what its latest forecast rests on
        self._outcomes: list[tuple[int, int, Opinions, Sequence[int]]] = []  # not learned from yet

    def calibrate(
        self, layer_idx: int, steps_ahead: int, forecast: Floats, prior: Floats, chosen: Sequence[int] = ()
    ) -> Floats:
        """Probabilities `[num_experts]` of use at the layer's next visit; remembered until `observe`.

        Args:
            layer_idx: the layer forecast.
            steps_ahead: how many layer visits ahead.
            forecast: the predictor's probabilities `[num_experts]`.
            prior: the reuse prior's.
            chosen: experts of the layer visit that the forecast is made from; empty if unknown.
        """
        if len(self._outcomes) >= BATCH_VISITS:
            self._learn()
        correlation = self._correlation(layer_idx, steps_ahead) if chosen and steps_ahead <= CORRELATED_STEPS else None
        correlated: npt.ArrayLike = 0.5 if correlation is None else correlation.probability(chosen)
        features = _features(forecast, prior, correlated)
        self._open.setdefault(layer_idx, {})[steps_ahead] = Opinions(features, correlation, chosen)
        return self._layer_fit(layer_idx, steps_ahead).probability(features)

    def observe(self, layer_idx: int, ids: Sequence[int] | None) -> None:
        """The layer was visited with these experts: score the forecasts that were open for it; None: drop them.

        A forward waits for this; so what there is to learn is learned later, from some at once.
        """
        for steps_ahead, opinions in self._open.pop(layer_idx, {}).items():
            if ids is not None:
                self._outcomes.append((layer_idx, steps_ahead, opinions, ids))

    def _learn(self) -> None:
        for layer_idx, steps_ahead, (features, correlation, chosen), ids in self._outcomes:
            self._layer_fit(layer_idx, steps_ahead).learn(features, ids)
            self._fits[steps_ahead].learn(features, ids)
            if correlation is not None:
                correlation.observe(chosen, ids)
        self._outcomes.clear()

    def coefficients(self, layer_idx: int, steps_ahead: int) -> tuple[float, float, float, float]:
        """Of forecast, prior, correlation, and the constant; for reports."""
        self._learn()
        forecast, prior, correlation, constant = self._layer_fit(layer_idx, steps_ahead).coefficients.tolist()
        return forecast, prior, correlation, constant

    def _correlation(self, layer_idx: int, steps_ahead: int) -> Correlation:
        correlation = self._correlations.get((layer_idx, steps_ahead))
        if correlation is None:
            origin_layer = (layer_idx - steps_ahead) % len(self._num_experts)
            correlation = Correlation(self._num_experts[origin_layer], self._num_experts[layer_idx])
            self._correlations[layer_idx, steps_ahead] = correlation
        return correlation

    def _layer_fit(self, layer_idx: int, steps_ahead: int) -> _Fit:
        fit = self._layer_fits.get((layer_idx, steps_ahead))
        if fit is None:
            base = self._fits.setdefault(steps_ahead, _Fit(START_COEFFICIENTS, BATCH_VISITS))
            fit = self._layer_fits[layer_idx, steps_ahead] = _Fit(
                [0.0] * len(START_COEFFICIENTS), LAYER_BATCH_VISITS, base
            )
        return fit
