"""Kinds of predictors that go by ids alone, the field's baselines: token, previous, popularity, correlation.

Each is fitted on some prompts, and scores every expert for each token of other prompts. Knows traces; not models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from promoe.training.routing_traces import RoutingTrace

Scores = npt.NDArray[np.float32]


class Kind(ABC):
    """A fitted predictor that is asked about all tokens of a trace, one layer at a time."""

    same_for_every_lookahead = False
    """Whether `scores` ignores the lookahead, so that it has to be asked only once."""

    @abstractmethod
    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Return how likely each token uses each expert of a layer, `[num_tokens, num_experts]`.

        It may use what is known `lookahead` layers before that layer, or at the first layer if there are fewer. None: nothing
        is known by then.
        """

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores | None:
        """Return probabilities of use from some rows of these scores; None: the kind gives none."""
        return None

    def next_token_scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Return scores like `scores`, but of each token's *successor*, from one of this token's last layers.

        None: the kind does not look across tokens, or not so far.
        """
        return None


def used(trace: RoutingTrace, layer_idx: int) -> Scores:
    """Return 1 where a token uses an expert of the layer, and otherwise 0, `[num_tokens, num_experts]`."""
    result = np.zeros((trace.num_tokens, trace.num_experts), dtype=np.float32)
    np.put_along_axis(result, trace.experts[:, layer_idx].astype(np.intp), 1.0, axis=1)
    return result


def spread(count: int, most: int) -> npt.NDArray[np.intp]:
    """Return at most `most` of the numbers below `count`, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.intp)


class Popularity(Kind):
    """Scores an expert by the share of tokens that used it."""

    same_for_every_lookahead = True

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._share = [used(fitted_on, layer_idx).mean(axis=0) for layer_idx in range(fitted_on.num_layers)]

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores:
        """Return the same scores for every token."""
        return np.broadcast_to(self._share[layer_idx], (trace.num_tokens, trace.num_experts))

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores:
        """Return the scores, which are probabilities."""
        return scores


class Token(Kind):
    """Scores an expert by how often the same token id used it; by popularity if the id is new (ProMoE section 3)."""

    same_for_every_lookahead = True

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._popularity = Popularity(fitted_on)
        self._known, rows = np.unique(fitted_on.token_ids, return_inverse=True)
        self._counts = []
        for layer_idx in range(fitted_on.num_layers):
            counts = np.zeros((len(self._known), fitted_on.num_experts), dtype=np.float32)
            np.add.at(counts, (rows[:, None], fitted_on.experts[:, layer_idx]), 1.0)
            self._counts.append(counts)

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores:
        """Return counts, which are known when the pass begins."""
        rows = np.minimum(np.searchsorted(self._known, trace.token_ids), len(self._known) - 1)
        is_known = self._known[rows] == trace.token_ids
        popularity = self._popularity.scores(trace, layer_idx, lookahead)
        # Popularity is at most 1, so it only breaks ties between counts.
        counts: Scores = np.where(is_known[:, None], self._counts[layer_idx][rows], np.float32(0))
        counts += popularity * np.float32(1e-3)
        return counts


class Previous(Kind):
    """Expects that a layer uses again what the previous token used, and for a prompt's first token what is popular."""

    same_for_every_lookahead = True

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._popularity = Popularity(fitted_on)

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores:
        """Return scores that are known since the previous token."""
        popularity = self._popularity.scores(trace, layer_idx, lookahead)
        result: Scores = np.array(popularity) * np.float32(1e-3)
        before = used(trace, layer_idx)[:-1]
        before[trace.prompt_starts[1:] - 1] = 0.0
        result[1:] += before
        return result


class Correlation(Kind):
    """Scores an expert by how often it followed the experts that the token used `lookahead` layers before (Klotski's table).

    A layer without a layer so far before it is predicted from the first (as ProMoE does), and the first is not predicted.
    """

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._fitted_on = fitted_on
        self._tables: dict[tuple[int, int], Scores] = {}

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Return the mean over the chosen experts of the earlier layer."""
        if layer_idx == 0:
            return None
        source = max(0, layer_idx - lookahead)
        mean: Scores = used(trace, source) @ self._table(source, layer_idx) / np.float32(trace.top_k)
        return mean

    def _table(self, source: int, target: int) -> Scores:
        table = self._tables.get((source, target))
        if table is None:
            fitted_on, num_experts = self._fitted_on, self._fitted_on.num_experts
            before, after = (fitted_on.experts[:, layer].astype(np.intp) for layer in (source, target))
            counts = np.zeros(num_experts**2, dtype=np.intp)
            for choice in after.T:
                pairs = (before * num_experts + choice[:, None]).ravel()
                counts += np.bincount(pairs, minlength=num_experts**2)
            uses = np.bincount(before.ravel(), minlength=num_experts)
            table = (counts.reshape(num_experts, -1) / np.maximum(uses, 1)[:, None]).astype(np.float32)
            self._tables[source, target] = table
        return table


KINDS: dict[str, Callable[[RoutingTrace], Kind]] = {
    "token": Token,
    "previous": Previous,
    "popularity": Popularity,
    "correlation": Correlation,
}
