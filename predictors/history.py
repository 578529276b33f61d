"""Predictors that go by a layer's own past: what the previous token used, and what is used most."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from .base import Forecast, LayerVisit, PredictorContext, horizon


class PreviousPredictor:
    """Expects that a layer uses again what its previous token used."""

    quick = True

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        self._context = context
        self._lookahead = lookahead
        self._last: dict[int, npt.NDArray[np.float64]] = {}

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Return the latest visit of each of the next layers as its forecast."""
        used = np.full(self._context.num_experts[visit.layer_idx], 0.05)
        latest = visit.chosen if visit.phase == "decode" else visit.chosen[-1:]  # decode: a token of each sequence
        used[list(itertools.chain.from_iterable(latest))] = 0.9
        self._last[visit.layer_idx] = used
        steps = horizon(visit.layer_idx, self._lookahead, self._context.num_layers)
        return [Forecast(k, layer, self._last[layer]) for k, layer in steps if layer in self._last]


class PopularityPredictor:
    """Expects that a layer uses what it has used most."""

    quick = True

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        self._context = context
        self._lookahead = lookahead
        self._uses = [np.zeros(n) for n in context.num_experts]
        self._tokens = [0] * context.num_layers

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Return the share of tokens so far that used each expert."""
        chosen = list(itertools.chain.from_iterable(visit.chosen))
        np.add.at(self._uses[visit.layer_idx], chosen, 1.0)
        self._tokens[visit.layer_idx] += len(visit.chosen)
        steps = horizon(visit.layer_idx, self._lookahead, self._context.num_layers)
        return [Forecast(k, layer, self._share(layer)) for k, layer in steps]

    def _share(self, layer_idx: int) -> npt.NDArray[np.float64]:
        # One pseudo-token of uniform use, so that a start is a guess and not a division by zero.
        prior = self._context.top_k[layer_idx] / self._context.num_experts[layer_idx]
        share: npt.NDArray[np.float64] = (self._uses[layer_idx] + prior) / (self._tokens[layer_idx] + 1)
        return np.minimum(share, 1.0)
