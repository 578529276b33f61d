"""Turns a predictor's forecasts into probabilities that can be trusted, and learns how while the model runs.

A predictor's probabilities may be optimistic, about the wrong token, or noise. Per lookahead, one logistic model joins
three probabilities, `logit p = a * logit f + b * logit p_r + c * logit p_c + d`: the forecast f, the reuse prior p_r,
and p_c, how often the experts just chosen were followed by this one. After visits, it is refitted by a decayed Newton
step: once for all layers together, and once for each layer, as a deviation from that. Noise is found out within a token
or two; a layer whose forecasts are better or worse than those of others is known after some more. A perfect forecast
drives a up. Noise drives a to 0, and then the forecast changes nothing: an expert that it names is fetched only if its
past use makes it probable enough.

The prior counts in full from the start, and a forecast has to earn its weight. So a useless predictor neither moves
bytes nor disturbs eviction. Layers deviate because hidden states do not say the same everywhere: in some models, those
of the first layer say little about the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .online_models import CrossLayerTable, NewtonSteps
from .reuse import P_MAX, P_MIN, Floats

# How many outcomes (one per expert and visit) the starting coefficients count for, and how many visits the fit remembers.
START_WEIGHT = 40.0
MEMORY_VISITS = 500.0
# Visits per refit, for which a forward may wait. A layer's own coefficients are refitted rarely, so that what all layers
# have in common is settled by then: two fits that correct the same error at once overshoot.
BATCH_VISITS = 8
LAYER_BATCH_VISITS = 32
# Of forecast, prior, cross-layer table, and the constant. The prior is calibrated; a forecast has to earn its weight.
START_COEFFICIENTS = (0.3, 1.0, 0.0, 0.0)
# The largest coefficient: a freak series of outcomes must not turn into certainty.
MAX_COEFFICIENT = 4.0
# Farther ahead, a cross-layer table says little, and every lookahead costs one per layer.
TABLE_STEPS = 2


class Basis(NamedTuple):
    """What a calibrated forecast was made from."""

    features: Floats
    """`[4, num_experts]`: log odds by forecast, prior and cross-layer table, and ones."""
    table: CrossLayerTable | None
    chosen: Sequence[int]
    """The experts that the layer chose that the forecast was made from."""


def _features(forecast: Floats, prior: Floats, by_table: npt.ArrayLike) -> Floats:
    """Return the log odds of probabilities, which are clamped to [0.001, 0.999], and ones."""
    features = np.ones((4, len(forecast)))
    odds = features[:3]
    odds[0] = forecast
    odds[1] = prior
    odds[2] = by_table
    np.maximum(odds, P_MIN, out=odds)
    np.minimum(odds, P_MAX, out=odds)
    odds /= 1.0 - odds
    np.log(odds, out=odds)
    return features


class _Fit:
    """Coefficients that are learned in batches of visits.

    Args:
        coefficients: the coefficients to start from.
        batch_visits: visits per refit.
        base: if given, this one is fitted as a deviation from the base's coefficients, whatever they become.
    """

    def __init__(self, coefficients: Sequence[float], batch_visits: int, base: _Fit | None = None) -> None:
        self._own = np.array(coefficients)
        self._base = base
        self._batch_visits = batch_visits
        self._steps = NewtonSteps(len(coefficients), START_WEIGHT, MEMORY_VISITS, ridge=1.0)
        self._batch: list[tuple[Floats, Sequence[int]]] = []

    @property
    def coefficients(self) -> Floats:
        """The coefficients of the features, `[4]`."""
        return self._own if self._base is None else self._own + self._base.coefficients

    def probability(self, features: Floats) -> Floats:
        """Return the probability of use `[num_experts]` for features `[4, num_experts]`."""
        p: Floats = self.coefficients.dot(features)
        np.negative(p, out=p)
        np.exp(p, out=p)
        p += 1.0
        np.divide(1.0, p, out=p)
        return p

    def learn(self, features: Floats, ids: Sequence[int]) -> None:
        """Learn that a visit with these features used these experts. It takes effect once a batch is full."""
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
    """Turns raw forecasts into probabilities that can be compared with the reuse prior.

    Args:
        num_experts: the number of experts of each layer.
    """

    def __init__(self, num_experts: Sequence[int]) -> None:
        self._num_experts = num_experts
        self._fits: dict[int, _Fit] = {}  # lookahead -> learned from all layers, and so quickly
        self._layer_fits: dict[tuple[int, int], _Fit] = {}  # (layer, lookahead) -> how the layer differs
        self._tables: dict[tuple[int, int], CrossLayerTable] = {}  # (layer, lookahead)
        self._open: dict[int, dict[int, Basis]] = {}  # layer -> lookahead -> the basis of its latest forecast
        self._outcomes: list[tuple[int, int, Basis, Sequence[int]]] = []  # not learned from yet

    def calibrate(
        self, layer_idx: int, steps_ahead: int, forecast: Floats, prior: Floats, chosen: Sequence[int] = ()
    ) -> Floats:
        """Return the probabilities `[num_experts]` of use at the layer's next visit, and remember them until `observe`.

        Args:
            layer_idx: the layer forecast.
            steps_ahead: how many layer visits ahead.
            forecast: the predictor's probabilities `[num_experts]`.
            prior: the reuse prior's probabilities `[num_experts]`.
            chosen: experts of the layer visit that the forecast is made from; empty if unknown.
        """
        if len(self._outcomes) >= BATCH_VISITS:
            self._learn()
        table = self._table(layer_idx, steps_ahead) if chosen and steps_ahead <= TABLE_STEPS else None
        by_table: npt.ArrayLike = 0.5 if table is None else table.probability(chosen)
        features = _features(forecast, prior, by_table)
        self._open.setdefault(layer_idx, {})[steps_ahead] = Basis(features, table, chosen)
        return self._layer_fit(layer_idx, steps_ahead).probability(features)

    def observe(self, layer_idx: int, ids: Sequence[int] | None) -> None:
        """Learn from a visit which experts the open forecasts of the layer should have named; None: drop them.

        A forward waits for this, so the learning is done later, from several visits at once.
        """
        for steps_ahead, basis in self._open.pop(layer_idx, {}).items():
            if ids is not None:
                self._outcomes.append((layer_idx, steps_ahead, basis, ids))

    def _learn(self) -> None:
        for layer_idx, steps_ahead, (features, table, chosen), ids in self._outcomes:
            self._layer_fit(layer_idx, steps_ahead).learn(features, ids)
            self._fits[steps_ahead].learn(features, ids)
            if table is not None:
                table.observe(chosen, ids)
        self._outcomes.clear()

    def coefficients(self, layer_idx: int, steps_ahead: int) -> tuple[float, float, float, float]:
        """Return the coefficients of forecast, prior, cross-layer table, and the constant; for reports."""
        self._learn()
        forecast, prior, table, constant = self._layer_fit(layer_idx, steps_ahead).coefficients.tolist()
        return forecast, prior, table, constant

    def _table(self, layer_idx: int, steps_ahead: int) -> CrossLayerTable:
        table = self._tables.get((layer_idx, steps_ahead))
        if table is None:
            origin_layer = (layer_idx - steps_ahead) % len(self._num_experts)
            table = CrossLayerTable(self._num_experts[origin_layer], self._num_experts[layer_idx])
            self._tables[layer_idx, steps_ahead] = table
        return table

    def _layer_fit(self, layer_idx: int, steps_ahead: int) -> _Fit:
        fit = self._layer_fits.get((layer_idx, steps_ahead))
        if fit is None:
            base = self._fits.setdefault(steps_ahead, _Fit(START_COEFFICIENTS, BATCH_VISITS))
            fit = self._layer_fits[layer_idx, steps_ahead] = _Fit(
                [0.0] * len(START_COEFFICIENTS), LAYER_BATCH_VISITS, base
            )
        return fit
