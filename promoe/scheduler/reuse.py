"""How likely an expert is to be used at its layer's next visit, judged by its own past (the reuse prior p_r)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The shortest is what makes it at least as good as LRU in small caches: neighbouring tokens share experts.
HALF_LIVES_TOKENS = (1.0, 7.0, 35.0)
MEAN = np.full(len(HALF_LIVES_TOKENS), 1.0 / len(HALF_LIVES_TOKENS))  # a product, for its call is cheap
# Older prompt tokens weigh less than 1/64 of the newest even at the longer half-life.
MAX_TOKENS_LEARNED = 210
P_MIN, P_MAX = 0.001, 0.999


class ReusePrior:
    """Mean of three decayed frequencies of use per token (half-lives 1, 7 and 35 tokens), for every expert.

    Prompt tokens are learned in order, so the last ones weigh as decode tokens do.
    """

    def __init__(self, num_layers: int, num_experts: int, initial: float = 0.1) -> None:
        self._decay = np.array([0.5 ** (1.0 / half_life) for half_life in HALF_LIVES_TOKENS]).reshape(-1, 1)
        self._gain = 1.0 - self._decay
        self._gains: list[float] = self._gain.ravel().tolist()
        self._frequency = np.full((num_layers, len(HALF_LIVES_TOKENS), num_experts), initial)
        # Layer -> (number of tokens, answer), since it last learned.
        self._probability: dict[int, tuple[int, Floats]] = {}

    def observe(self, layer_idx: int, tokens: Sequence[Sequence[int]]) -> None:
        """Learn the experts chosen by each token of a visit, oldest first; `tokens` is `[num_tokens][at most top_k]`."""
        self._probability.pop(layer_idx, None)
        frequency = self._frequency[layer_idx]
        if len(tokens) == 1:
            chosen = np.asarray(tokens[0], dtype=np.intp)
            frequency *= self._decay
            for row, gain in zip(frequency, self._gains, strict=True):
                row[chosen] += gain
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
        per_token = MEAN.dot(self._frequency[layer_idx])
        if num_tokens > 1:
            per_token = 1.0 - (1.0 - np.minimum(per_token, 1.0)) ** num_tokens
        clamped: Floats = np.minimum(np.maximum(per_token, P_MIN), P_MAX)
        clamped.flags.writeable = False
        self._probability[layer_idx] = (num_tokens, clamped)
        return clamped
