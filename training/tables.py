"""Kinds that predict from ids alone: token, previous, popularity, correlation. The field's baselines.

Each is fitted on some prompts, and scores every expert for each token of others. Knows traces; not models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from promoe.training.routing_traces import RoutingTrace

Scores = npt.NDArray[np.float32]


class Kind(ABC):
    """A fitted predictor, asked about all tokens of a trace, a layer at a time."""

    same_for_every_lookahead = False
    """Whether `scores` ignores the lookahead, so that it need be asked once."""

    @abstractmethod
    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """How likely each token uses each expert of a layer, `[num_tokens, num_experts]`, as known `lookahead` layers
        before it, or at the first layer if there are fewer; None where nothing is known by then."""

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores | None:
        """Probabilities of use from some rows of these scores; None: the kind gives none."""
        return None

    def next_token_scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Like `scores`, of a layer of each token's *successor*, as known `lookahead` layers before it: at one of this
        token's last layers. None: the kind does not look across tokens, or not so far."""
        return None


def used(trace: RoutingTrace, layer_idx: int) -> Scores:
    """1 where a token uses an expert of the layer, `[num_tokens, num_experts]`."""
    result = np.zeros((trace.num_tokens, trace.num_experts), dtype=np.float32)
    np.put_along_axis(result, trace.experts[:, layer_idx].astype(np.intp), 1.0, axis=1)
    return result


def spread(count: int, most: int) -> npt.NDArray[np.intp]:
    """At most `most` of the numbers below `count`, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.intp)


class Popularity(Kind):
    """The share of tokens that used an expert."""

    same_for_every_lookahead = True

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._share = [used(fitted_on, layer_idx).mean(axis=0) for layer_idx in range(fitted_on.num_layers)]

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores:
        """The same for every token."""
        return np.broadcast_to(self._share[layer_idx], (trace.num_tokens, trace.num_experts))

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores:
        """What it scores are probabilities."""
        return scores


class Token(Kind):
    """How often an expert was used by the same token id; by popularity where the id is new (ProMoE section 3)."""

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
        """Known from the pass's start."""
        rows = np.minimum(np.searchsorted(self._known, trace.token_ids), len(self._known) - 1)
        is_known = self._known[rows] == trace.token_ids
        popularity = self._popularity.scores(trace, layer_idx, lookahead)
        # Popularity, at most 1, only breaks ties between counts.
        counts: Scores = np.where(is_known[:, None], self._counts[layer_idx][rows], np.float32(0))
        counts += popularity * np.float32(1e-3)
        return counts


class Previous(Kind):
    """A layer uses again what the token before used; a prompt's first token, what is popular."""

    same_for_every_lookahead = True

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._popularity = Popularity(fitted_on)

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores:
        """Known since the token before."""
        popularity = self._popularity.scores(trace, layer_idx, lookahead)
        result: Scores = np.array(popularity) * np.float32(1e-3)
        before = used(trace, layer_idx)[:-1]
        before[trace.prompt_starts[1:] - 1] = 0.0
        result[1:] += before
        return result


class Correlation(Kind):
    """What followed the experts that the token used `lookahead` layers before (Klotski's table).

    Layers that have none so far before them are predicted from the first (as ProMoE does), the first not at all.
    """

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._fitted_on = fitted_on
        self._tables: dict[tuple[int, int], Scores] = {}

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Mean over the chosen experts of the earlier layer."""
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
