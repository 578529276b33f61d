"""How likely an expert is to be used at its layer's next visit, judged by the layer's own past (the reuse prior p_r).

Two things of that past count: how often an expert was used lately, and which experts were used just now, for some follow
each other and some never do. What the first says starts from what holds for any model, the second (`association`) from
nothing; both are learned while running. What is predicted is use within the next few visits; the rate of use per visit
follows from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .association import Association, LogOdds
from .newton import NewtonSteps

Floats = npt.NDArray[np.float64]

HALF_LIVES_TOKENS = (1.0, 8.0, 64.0)
# To start from, of the log odds of the frequencies, and the constant: a logistic regression of use within HORIZON_VISITS
# over the routing of DeepSeek-V2-Lite and gpt-oss-20b together (`benchmarks/reuse_prior.py` prints it).
START_WEIGHTS = (0.099, 0.164, 0.575, 0.996)
# What the start is worth, in outcomes (one per expert and visit), and the memory of the weights, in visits.
START_OUTCOMES, MEMORY_VISITS = 500.0, 20_000.0
# One visit only would be learned faster, and would say too little about experts that are used now and then.
HORIZON_VISITS = 3
# Older prompt tokens weigh less than 1/64 of the newest even at the longest half-life that moves within a prompt.
MAX_TOKENS_LEARNED = 384
# Sequences of a batch that are followed apart.
MAX_SEQUENCES = 8
# Visits of a layer that are learned from at once, which is much cheaper than one by one.
BATCH_VISITS = 8
P_MIN, P_MAX = 0.001, 0.999


class LearnedReuse(NamedTuple):
    """What a reuse prior has learned of a model, to start another one from."""

    weights: LogOdds
    """Of the log odds of the frequencies, and the constant, `[4]`."""
    associations: LogOdds
    """What the use of an expert adds to the others' log odds, `[num_layers, num_experts, num_experts]`."""


class _Visit(NamedTuple):
    """A visit that may be learned from."""

    tokens: Sequence[Sequence[int]]
    """The experts of each sequence's token."""
    features: LogOdds
    """`[half_lives + 1, num_experts]`: log odds of the frequencies, the visit included, and ones."""


class _Weights:
    """Of the features, for all layers: a logistic regression, refitted by decayed Newton steps."""

    def __init__(self, start: npt.ArrayLike) -> None:
        self.values = np.array(start, dtype=np.float32)
        self._steps = NewtonSteps(len(self.values), START_OUTCOMES, MEMORY_VISITS)

    def correct(self, features: LogOdds, expected: LogOdds, errors: LogOdds) -> None:
        """Learn from visits: features `[num_visits, features, num_experts]`, the others `[num_visits, num_experts]`."""
        flat = features.transpose(1, 0, 2).reshape(len(self.values), -1)
        self.values += self._steps.step(flat, expected.ravel(), errors.ravel(), len(features)).astype(np.float32)


class ReusePrior:
    """Decayed frequencies of use per token (half-lives 1, 8 and 64 tokens), and what follows what, for every expert.

    Prompt tokens are learned in order, so the last ones weigh as decode tokens do.
    """

    def __init__(
        self, num_layers: int, num_experts: int, initial: float = 0.1, learned: LearnedReuse | None = None
    ) -> None:
        self._decay = np.array([0.5 ** (1.0 / half_life) for half_life in HALF_LIVES_TOKENS]).reshape(-1, 1)
        self._gain = 1.0 - self._decay
        self._frequency = np.full((num_layers, len(HALF_LIVES_TOKENS), num_experts), initial)
        self._weights = _Weights(START_WEIGHTS if learned is None else learned.weights)
        # By the frequencies alone, as of each layer's latest visit: what other layers teach since then comes with its next.
        self._own: list[LogOdds] = [self._weights.values.dot(_features(layer)) for layer in self._frequency]
        self._associations = [Association(num_experts) for _ in range(num_layers)]
        self._visits: list[deque[_Visit]] = [deque() for _ in range(num_layers)]  # the latest, not yet learned from
        self._announced: dict[int, Sequence[int]] = {}  # layer -> what its gate has chosen for a visit to come
        self._top_k = 0
        # Layer -> (number of tokens, answer), since it last learned.
        self._probability: dict[int, tuple[int, Floats]] = {}

        if learned is not None:
            for association, weights in zip(self._associations, learned.associations, strict=True):
                association.start_from(weights)

    def learned(self) -> LearnedReuse:
        """A copy of what was learned so far."""
        associations = np.stack([association.weights for association in self._associations])
        return LearnedReuse(self._weights.values.copy(), associations)

    def observe(self, layer_idx: int, tokens: Sequence[Sequence[int]]) -> None:
        """Learn the experts chosen by each token of a visit, oldest first; `tokens` is `[num_tokens][at most top_k]`."""
        self._probability.pop(layer_idx, None)
        self._announced.pop(layer_idx, None)
        self._count(layer_idx, tokens)
        visits, followed = self._visits[layer_idx], tokens if len(tokens) <= MAX_SEQUENCES else tokens[-1:]
        if visits and len(visits[-1].tokens) != len(tokens):
            visits.clear()  # other sequences: what comes next does not follow from what was
        features = _features(self._frequency[layer_idx])
        self._own[layer_idx] = self._weights.values.dot(features)
        visits.append(_Visit(followed, features))
        if len(visits) == HORIZON_VISITS + BATCH_VISITS:
            self._learn(layer_idx)

    def announce(self, layer_idx: int, ids: Sequence[int]) -> None:
        """A gate chose these experts for the layer's next visit: what follows them is known a little earlier."""
        if len(ids) <= self._top_k:  # else of several tokens, and which of them belong together is not known yet
            self._probability.pop(layer_idx, None)
            self._announced[layer_idx] = ids

    def _count(self, layer_idx: int, tokens: Sequence[Sequence[int]]) -> None:
        frequency = self._frequency[layer_idx]
        if len(tokens) == 1:
            chosen = np.asarray(tokens[0], dtype=np.intp)
            self._top_k = max(self._top_k, len(chosen))
            frequency *= self._decay
            frequency[:, chosen] += self._gain
            return
        tokens = tokens[-MAX_TOKENS_LEARNED:]
        chosen = np.fromiter(chain.from_iterable(tokens), dtype=np.intp)
        counts = [len(token) for token in tokens]
        age = np.arange(len(tokens) - 1, -1, -1)
        weights = self._gain * self._decay**age  # [half_lives, num_tokens]
        frequency *= self._decay ** len(tokens)
        for row, weight in zip(frequency, weights, strict=True):
            row += np.bincount(chosen, np.repeat(weight, counts), minlength=row.size)

    def probability(self, layer_idx: int, num_tokens: int = 1) -> Floats:
        """Probability of use `[num_experts]` by a visit of `num_tokens` tokens, clamped to [0.001, 0.999]. Read only."""
        known = self._probability.get(layer_idx)
        if known is not None and known[0] == num_tokens:
            return known[1]
        used = self._used(layer_idx, num_tokens)
        clamped: Floats = np.minimum(np.maximum(used, P_MIN), P_MAX)
        clamped.flags.writeable = False
        self._probability[layer_idx] = (num_tokens, clamped)
        return clamped

    def _used(self, layer_idx: int, num_tokens: int) -> Floats:
        visits, association = self._visits[layer_idx], self._associations[layer_idx]
        log_odds, tokens = self._own[layer_idx], visits[-1].tokens if visits else ((),)
        if (announced := self._announced.get(layer_idx)) is not None:
            tokens = [announced]
        if len(tokens) != num_tokens or num_tokens == 1:
            rate = _rate(association.log_odds(log_odds, tokens[-1]))
            return rate if num_tokens == 1 else 1.0 - (1.0 - rate) ** num_tokens
        unused = np.ones(len(log_odds))
        for chosen in tokens:
            unused *= 1.0 - _rate(association.log_odds(log_odds, chosen))
        return 1.0 - unused

    def _learn(self, layer_idx: int) -> None:
        """From the visits whose horizon has passed."""
        visits, features, chosen, following = self._visits[layer_idx], [], [], []
        for _ in range(BATCH_VISITS):
            visit = visits.popleft()
            for sequence_idx, ids in enumerate(visit.tokens):
                if ids:
                    later = (after.tokens[sequence_idx] for after in islice(visits, HORIZON_VISITS))
                    features.append(visit.features)
                    chosen.append(ids)
                    following.append(list(set(chain.from_iterable(later))))
        if chosen:
            self._correct(self._associations[layer_idx], np.stack(features), chosen, following)

    def _correct(
        self,
        association: Association,
        features: LogOdds,
        chosen: Sequence[Sequence[int]],
        following: Sequence[Sequence[int]],
    ) -> None:
        own: LogOdds = self._weights.values.dot(features)  # [num_visits, num_experts]
        expected = association.log_odds_of(own, chosen)
        np.negative(expected, out=expected)
        np.exp(expected, out=expected)
        expected += 1.0
        np.reciprocal(expected, out=expected)
        errors = -expected
        for error, ids in zip(errors, following, strict=True):
            error[ids] += 1.0
        association.correct(errors, chosen)
        self._weights.correct(features, expected, errors)


def _features(frequency: Floats) -> LogOdds:
    """Log odds of frequencies `[half_lives, num_experts]`, and ones."""
    features: LogOdds = np.ones((len(frequency) + 1, frequency.shape[1]), dtype=np.float32)
    odds = features[:-1]
    np.maximum(frequency, P_MIN, out=odds, casting="same_kind")
    np.minimum(odds, P_MAX, out=odds)
    odds /= 1.0 - odds
    np.log(odds, out=odds)
    return features


def _rate(log_odds: LogOdds) -> Floats:
    """Probability of use at one visit, from the log odds of use within the horizon."""
    rate: Floats = 1.0 - (1.0 + np.exp(log_odds.astype(np.float64))) ** (-1.0 / HORIZON_VISITS)
    return rate
