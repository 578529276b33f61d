"""Klotski's table (Fang et al. 2025): which experts of a layer a token uses after which of the layer before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base import Forecast, LayerVisit, PredictorContext, any_token

# How many tokens of uniform use each row begins with, so that a start is a guess and not a division by zero.
PRIOR_TOKENS = 1.0


class CorrelationPredictor:
    """Expects what tokens used in the next layer after the experts that these tokens use in this one.

    It counts, for each pair of neighbouring layers, how often a token used expert j of the later one after expert i of the
    earlier one (path length 1), and learns while it runs. What a visit of several tokens will use is joined from all of them.

    Args:
        context: the model.
        lookahead: not used: the table is of neighbouring layers.
    """

    quick = True
    # Otherwise tokens of different passes would be paired.
    needs_every_visit = True

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        counts, top_k = context.num_experts, context.top_k
        # The next layer of the last one is the first layer of the next token.
        self._next = [(layer_idx + 1) % context.num_layers for layer_idx in range(context.num_layers)]
        self._uses = [
            np.full((count, counts[after]), PRIOR_TOKENS * top_k[after] / counts[after])
            for count, after in zip(counts, self._next, strict=True)
        ]
        self._tokens = [np.full(count, PRIOR_TOKENS) for count in counts]
        self._last: tuple[int, int, int, list[list[int]]] | None = None

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Learn from the pair of visits that this one completes, and forecast the next layer."""
        chosen = [list(token) for token in visit.chosen]
        self._learn(visit, chosen)
        self._last = (visit.layer_idx, visit.pass_idx, visit.all_tokens, chosen)
        after = self._next[visit.layer_idx]
        # After the last layer, each sequence goes on with one token.
        going_on = chosen if after or visit.phase == "decode" else chosen[-1:]
        return [Forecast(1, after, self._used(visit.layer_idx, going_on))]

    def _learn(self, visit: LayerVisit, chosen: list[list[int]]) -> None:
        if self._last is None:
            return
        layer_idx, pass_idx, all_tokens, before = self._last
        follows = visit.layer_idx == self._next[layer_idx] and visit.pass_idx == pass_idx + (visit.layer_idx == 0)
        if not follows or (all_tokens, len(before)) != (visit.all_tokens, len(chosen)):
            return
        for one, other in zip(before, chosen, strict=True):
            if one and other:
                self._uses[layer_idx][np.ix_(one, other)] += 1.0
                self._tokens[layer_idx][one] += 1.0

    def _used(self, layer_idx: int, tokens: list[list[int]]) -> npt.NDArray[np.float64]:
        """Return the probability that one token or more uses each expert of the next layer."""
        uses, counts = self._uses[layer_idx], self._tokens[layer_idx]
        per_token = [(uses[token] / counts[token, None]).mean(axis=0) for token in tokens if token]
        return any_token(np.minimum(1.0, np.array(per_token).reshape(-1, uses.shape[1])))
