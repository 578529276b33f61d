"""The reuse prior p_r: how probable it is that an expert is used at its layer's next visit, judged by the layer's past.

Two things of that past count: how often an expert was used lately, and which experts were used just now, because some
follow each other and some never do. The weights of the first start from values that hold for any model; those of the
second (`SameLayerModel`) start at zero. Both are learned while running. A trained predictor adds a third: what the layer's
gate sees (`foresee`). All of them predict use within the next few visits; the rate of use per visit follows from that.

This needs no training: the second part is learned from zero within some hundred tokens. docs/benchmarks.md (Eviction)
says how much of the gap between LRU and Belady it closes. A hint counts as the use that it announces, because victims
are chosen between the hint and the visit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .online_models import LogOdds, NewtonSteps, SameLayerModel

Floats = npt.NDArray[np.float64]

HALF_LIVES_TOKENS = (1.0, 8.0, 64.0)
# The starting weights of the frequencies' log odds, and the constant: from a logistic regression of use within
# HORIZON_VISITS over the routing of DeepSeek-V2-Lite and gpt-oss-20b together (benchmarks/NOTES.md).
START_WEIGHTS = (0.099, 0.164, 0.575, 0.996)
# How many outcomes (one per expert and visit) the starting weights count for, and how many visits the weights remember.
START_OUTCOMES, MEMORY_VISITS = 500.0, 20_000.0
# A single visit would be learned faster, but says too little about experts that are used now and then.
HORIZON_VISITS = 3
# Older prompt tokens weigh less than 1/64 of the newest even at the longest half-life that moves within a prompt.
MAX_TOKENS_LEARNED = 384
# The most sequences of a batch that are followed separately.
MAX_SEQUENCES = 8
# A layer learns from this many visits at once, which is much cheaper than one by one.
BATCH_VISITS = 8
P_MIN, P_MAX = 0.001, 0.999
MAX_LOG_ODDS = math.log(P_MAX / P_MIN)


class LearnedReuse(NamedTuple):
    """What a reuse prior has learned of a model, for another one to start from."""

    weights: LogOdds
    """The weights of the frequencies' log odds, of the foreseen ones (if any), and the constant: `[4]` or `[5]`."""
    associations: LogOdds
    """What the use of an expert adds to the others' log odds, `[num_layers, num_experts, num_experts]`."""
    foreseen: LogOdds | None = None
    """The foreseen log odds before the first forecast, `[num_layers, num_experts]`; None: there are no such forecasts."""

    @classmethod
    def foreseeing(cls, typical: LogOdds, weight: float = 0.0) -> LearnedReuse:
        """Return a start with nothing learned, in which the foreseen log odds are a feature.

        Args:
            typical: see `foreseen`.
            weight: the starting weight of the foreseen log odds.
        """
        weights = np.array([*START_WEIGHTS[:-1], weight, START_WEIGHTS[-1]], dtype=np.float32)
        return cls(weights, np.zeros((*typical.shape, typical.shape[1]), dtype=np.float32), typical)


class _Recent:
    """The latest visits of one layer that nothing was learned from yet, oldest first; at most `MAX_VISITS`."""

    MAX_VISITS = HORIZON_VISITS + BATCH_VISITS

    def __init__(self, num_experts: int, num_features: int) -> None:
        self.tokens: list[Sequence[Sequence[int]]] = []
        """The experts of each sequence's token, per visit."""
        self.features: LogOdds = np.ones((num_features, self.MAX_VISITS, num_experts), dtype=np.float32)
        """Log odds of the frequencies (the visit included), foreseen log odds (if there are any), and ones.

        Its shape is `[num_features, MAX_VISITS, num_experts]`.
        """
        self._used: LogOdds = np.zeros((self.MAX_VISITS, 1, num_experts), dtype=np.float32)
        # In one piece: numpy takes twice as long for parts of an array.
        self._odds, self._rest = np.empty((2, len(HALF_LIVES_TOKENS), num_experts))

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[Sequence[int]]) -> LogOdds:
        """Add a visit. Returns 1 where a sequence's token used an expert, `[num_sequences, num_experts]`."""
        if len(tokens) != self._used.shape[1]:
            assert not self.tokens, "other sequences than before"
            self._used = np.zeros((self.MAX_VISITS, len(tokens), self._used.shape[2]), dtype=np.float32)
        used: LogOdds = self._used[len(self.tokens)]
        used.fill(0.0)
        for row, ids in zip(used, tokens, strict=True):
            if ids:
                row.put(ids, 1.0)
        self.tokens.append(tokens)
        return used

    def write_features(self, frequency: Floats, foreseen: LogOdds | None) -> LogOdds:
        """Compute the features `[num_features, num_experts]` of the latest visit, and return them.

        Args:
            frequency: `[half_lives, num_experts]`.
            foreseen: the foreseen log odds `[num_experts]`, if there are any.
        """
        odds, rest = self._odds, self._rest
        np.maximum(frequency, P_MIN, out=odds)
        np.minimum(odds, P_MAX, out=odds)
        np.subtract(1.0, odds, out=rest)
        odds /= rest
        np.log(odds, out=odds)
        features = self.latest_features()
        features[: len(odds)] = odds
        if foreseen is not None:
            features[len(odds)] = foreseen
        return features

    def latest_features(self) -> LogOdds:
        """Return the features of the latest visit, `[num_features, num_experts]`; not a copy."""
        features: LogOdds = self.features[:, max(0, len(self.tokens) - 1)]
        return features

    def used(self) -> LogOdds:
        """Return 1 where the oldest visits used an expert, `[BATCH_VISITS * num_sequences, num_experts]`."""
        return self._used[:BATCH_VISITS].reshape(-1, self._used.shape[2])

    def followed(self) -> LogOdds:
        """Return 1 where an expert was used within the horizon of the oldest visits; shaped like `used`."""
        used = self._used
        found = np.maximum(used[1 : 1 + BATCH_VISITS], used[2 : 2 + BATCH_VISITS])
        for ahead in range(3, HORIZON_VISITS + 1):
            np.maximum(found, used[ahead : ahead + BATCH_VISITS], out=found)
        return found.reshape(-1, used.shape[2])

    def forget(self) -> None:
        """Forget the oldest visits, which were learned from."""
        del self.tokens[:BATCH_VISITS]
        self.features[:, :HORIZON_VISITS] = self.features[:, BATCH_VISITS:]
        self._used[:HORIZON_VISITS] = self._used[BATCH_VISITS:]


class _Weights:
    """The weights of the features, for all layers: a logistic regression, refitted by decayed Newton steps."""

    def __init__(self, start: npt.ArrayLike) -> None:
        self.values = np.array(start, dtype=np.float32)
        self._steps = NewtonSteps(len(self.values), START_OUTCOMES, MEMORY_VISITS)

    def correct(self, features: LogOdds, expected: LogOdds, errors: LogOdds) -> None:
        """Learn from visits: features `[features, num_visits, num_experts]`, the rest `[num_visits, num_experts]`."""
        flat = features.reshape(len(self.values), -1)
        self.values += self._steps.step(flat, expected.ravel(), errors.ravel(), len(errors)).astype(np.float32)


class ReusePrior:
    """Decayed frequencies of use per token (half-lives 1, 8 and 64 tokens), and which expert follows which.

    Prompt tokens are learned in order, so the last ones count like decode tokens.

    Args:
        num_layers: MoE layers.
        num_experts: experts of each layer.
        initial: the frequency of use of each expert before its layer's first visit.
        learned: what another prior has learned of the model.
    """

    def __init__(
        self, num_layers: int, num_experts: int, initial: float = 0.1, learned: LearnedReuse | None = None
    ) -> None:
        # One row per half-life, one column per expert: numpy is fast on arrays of one shape.
        decay = [[0.5 ** (1.0 / half_life)] * num_experts for half_life in HALF_LIVES_TOKENS]
        self._decay = np.array(decay)
        self._gain = 1.0 - self._decay
        self._gained = np.empty_like(self._gain)
        self._frequency = np.full((num_layers, len(HALF_LIVES_TOKENS), num_experts), initial)
        self._weights = _Weights(START_WEIGHTS if learned is None else learned.weights)
        self._foreseen = None if learned is None or learned.foreseen is None else learned.foreseen.copy()
        num_features = len(HALF_LIVES_TOKENS) + (self._foreseen is not None) + 1
        assert len(self._weights.values) == num_features, (
            f"{len(self._weights.values)} weights, {num_features} features"
        )
        # Log odds without the same-layer model, as of each layer's latest visit. Weights that other layers have changed
        # since then are used from its next visit on.
        self._own: LogOdds = np.empty((num_layers, num_experts), dtype=np.float32)
        self._answered = [0] * num_layers  # number of tokens that `_answers` is for; 0: the layer has learned since
        self._same_layer = [SameLayerModel(num_experts) for _ in range(num_layers)]
        self._visits = [_Recent(num_experts, num_features) for _ in range(num_layers)]
        for layer_idx in range(num_layers):
            self._judge(layer_idx)
        self._announced: dict[int, Sequence[int]] = {}  # layer -> what its gate has chosen for its next visit
        self._top_k = 0
        self._answers = np.empty((num_layers, num_experts))  # probabilities
        self._read_only = self._answers.view()
        self._read_only.flags.writeable = False

        if learned is not None:
            for model, weights in zip(self._same_layer, learned.associations, strict=True):
                if weights.any():
                    model.start_from(weights)

    def learned(self) -> LearnedReuse:
        """Return a copy of what was learned so far."""
        associations = np.stack([model.weights for model in self._same_layer])
        foreseen = None if self._foreseen is None else self._foreseen.copy()
        return LearnedReuse(self._weights.values.copy(), associations, foreseen)

    def start_from(self, layer_idx: int, rates: Sequence[float]) -> bool:
        """Take uses per token and expert (at most 1) as a layer's past, unless it has one. Returns whether it did."""
        visits, frequency = self._visits[layer_idx], self._frequency[layer_idx]
        if visits.tokens:
            return False
        frequency[:, : len(rates)] = rates
        self._judge(layer_idx)
        return True

    def foresee(self, layer_idx: int, log_odds: npt.ArrayLike, begun: bool) -> bool:
        """Take a predictor's forecast, made from what a layer's gate sees, of the experts that its next visits will use.

        Args:
            layer_idx: the layer.
            log_odds: of use within the next `HORIZON_VISITS` visits, `[num_experts]`; the mean over several tokens.
            begun: whether the visit that this was made from has been observed; else it is the next one.

        Returns:
            Whether it is used: only if the prior has learned how much to trust it.
        """
        if self._foreseen is None:
            return False
        foreseen = self._foreseen[layer_idx]
        foreseen[: np.size(log_odds)] = log_odds
        if begun:
            features = self._visits[layer_idx].latest_features()
            features[len(HALF_LIVES_TOKENS)] = foreseen
            self._weigh(layer_idx, features)
        return True

    def _judge(self, layer_idx: int) -> None:
        """Compute the log odds that each expert of a layer has by itself, from its frequencies and what is foreseen."""
        foreseen = None if self._foreseen is None else self._foreseen[layer_idx]
        self._weigh(layer_idx, self._visits[layer_idx].write_features(self._frequency[layer_idx], foreseen))

    def _weigh(self, layer_idx: int, features: LogOdds) -> None:
        self._own[layer_idx] = self._weights.values.dot(features)
        self._answered[layer_idx] = 0

    def observe(self, layer_idx: int, tokens: Sequence[Sequence[int]]) -> None:
        """Learn the experts chosen by each token of a visit, oldest first; `tokens` is `[num_tokens][at most top_k]`."""
        self._announced.pop(layer_idx, None)
        visits, frequency = self._visits[layer_idx], self._frequency[layer_idx]
        if visits.tokens and len(visits.tokens[-1]) != len(tokens):
            visits.tokens.clear()  # other sequences: their experts do not follow from those before
        used = visits.add(tokens if len(tokens) <= MAX_SEQUENCES else tokens[-1:])
        if len(tokens) == 1:
            self._top_k = max(self._top_k, len(tokens[0]))
            frequency *= self._decay
            np.multiply(self._gain, used, out=self._gained)
            frequency += self._gained
        else:
            self._count(frequency, tokens)
        self._judge(layer_idx)
        if len(visits) == _Recent.MAX_VISITS:
            self._learn(layer_idx)

    def announce(self, layer_idx: int, ids: Sequence[int]) -> None:
        """Take what a gate has chosen for the layer's next visit, so that what follows is known a little earlier."""
        if len(ids) <= self._top_k:  # else there are several tokens, and which experts belong together is not known yet
            self._answered[layer_idx] = 0
            self._announced[layer_idx] = ids

    def _count(self, frequency: Floats, tokens: Sequence[Sequence[int]]) -> None:
        """Count the experts of several tokens, oldest first."""
        tokens = tokens[-MAX_TOKENS_LEARNED:]
        chosen = np.fromiter(chain.from_iterable(tokens), dtype=np.intp)
        counts = [len(token) for token in tokens]
        age = np.arange(len(tokens) - 1, -1, -1)
        weights = self._gain[:, :1] * self._decay[:, :1] ** age  # [half_lives, num_tokens]
        frequency *= self._decay ** len(tokens)
        for row, weight in zip(frequency, weights, strict=True):
            row += np.bincount(chosen, np.repeat(weight, counts), minlength=row.size)

    def probability(self, layer_idx: int, num_tokens: int = 1) -> Floats:
        """Return the probability of use `[num_experts]` by a visit of `num_tokens` tokens, clamped to [0.001, 0.999].

        Do not write to it, and use it only until the layer learns or is asked about again.
        """
        if self._answered[layer_idx] != num_tokens:
            self.probabilities([layer_idx], num_tokens)
        answer: Floats = self._read_only[layer_idx]
        return answer

    def probabilities(self, layers: Sequence[int], num_tokens: int = 1) -> Floats:
        """Return the same for several layers, `[len(layers), num_experts]`; it takes little longer than for one."""
        unknown = [layer_idx for layer_idx in layers if self._answered[layer_idx] != num_tokens]
        if unknown:
            used = self._used(unknown, num_tokens)
            np.maximum(used, P_MIN, out=used)
            np.minimum(used, P_MAX, out=used)
            for layer_idx, answer in zip(unknown, used, strict=True):
                self._answers[layer_idx] = answer
                self._answered[layer_idx] = num_tokens
            if len(unknown) == len(layers):
                return used
        return self._answers.take(layers, axis=0)

    def _used(self, layers: Sequence[int], num_tokens: int) -> Floats:
        if num_tokens > 1:
            return np.stack([self._used_by_several(layer_idx, num_tokens) for layer_idx in layers])
        log_odds = np.empty((len(layers), self._own.shape[1]))
        for row, layer_idx in zip(log_odds, layers, strict=True):
            row[...] = self._same_layer[layer_idx].log_odds(self._own[layer_idx], self._latest(layer_idx)[-1])
        return _rate(log_odds)

    def _used_by_several(self, layer_idx: int, num_tokens: int) -> Floats:
        model, own, tokens = self._same_layer[layer_idx], self._own[layer_idx], self._latest(layer_idx)
        if len(tokens) != num_tokens:
            return 1.0 - (1.0 - _rate(model.log_odds(own, tokens[-1]).astype(np.float64))) ** num_tokens
        unused = np.ones(len(own))
        for chosen in tokens:
            unused *= 1.0 - _rate(model.log_odds(own, chosen).astype(np.float64))
        return 1.0 - unused

    def _latest(self, layer_idx: int) -> Sequence[Sequence[int]]:
        """Return what each sequence's latest token has chosen, as far as known."""
        if (announced := self._announced.get(layer_idx)) is not None:
            return [announced]
        tokens = self._visits[layer_idx].tokens
        return tokens[-1] if tokens else ((),)

    def _learn(self, layer_idx: int) -> None:
        """Learn from the visits whose horizon has passed."""
        visits = self._visits[layer_idx]
        chosen = [ids for tokens in visits.tokens[:BATCH_VISITS] for ids in tokens]
        features = visits.features[:, :BATCH_VISITS].repeat(len(chosen) // BATCH_VISITS, axis=1)
        used, followed = visits.used(), visits.followed()
        if not all(chosen):  # a token without experts teaches nothing
            told = [row for row, ids in enumerate(chosen) if ids]
            chosen, features = [chosen[row] for row in told], features.take(told, axis=1)
            used, followed = used.take(told, axis=0), followed.take(told, axis=0)
        if chosen:
            self._correct(self._same_layer[layer_idx], features, chosen, used, followed)
        visits.forget()

    def _correct(
        self,
        model: SameLayerModel,
        features: LogOdds,
        chosen: Sequence[Sequence[int]],
        used: LogOdds,
        followed: LogOdds,
    ) -> None:
        # [num_visits, num_experts]
        own: LogOdds = self._weights.values.dot(features.reshape(len(features), -1)).reshape(followed.shape)
        expected = model.log_odds_of(own, chosen, used)
        np.negative(expected, out=expected)
        np.exp(expected, out=expected)
        expected += 1.0
        np.reciprocal(expected, out=expected)
        errors = followed - expected
        model.correct(errors, chosen, used)
        self._weights.correct(features, expected, errors)


def _rate(log_odds: Floats) -> Floats:
    """Turn log odds of use within the horizon into the probability of use at one visit, in place."""
    rate = np.exp(log_odds, out=log_odds)
    rate += 1.0
    rate **= -1.0 / HORIZON_VISITS
    np.subtract(1.0, rate, out=rate)
    return rate
