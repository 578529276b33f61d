"""Which resident expert makes room: the one with the largest score.

A policy sees layer visits and loads, in order, and answers with scores for all experts at once (numpy), because it is
asked at most once per layer event; it never sees slots or pins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .config import EvictionName
from .reuse import P_MAX, P_MIN, Floats, ReusePrior


class Eviction(Protocol):
    """A policy over experts `[num_layers, num_experts]`."""

    comparable: bool
    """Whether scores of absent and resident experts may be compared, so that a prefetch can be refused its victim."""

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """A layer is being visited with these experts; its next visit is expected to have `num_next` tokens."""

    def announced(self, layer_idx: int) -> None:
        """The layer's gate has chosen; the reuse prior knows what."""

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """An expert is given a slot."""

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Calibrated probabilities of use `[num_experts]` at the layer's next visit, or None to forget them."""

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """How often experts were used before, `[num_layers][num_experts]`; the reuse prior knows it already."""

    def scores(self, current_layer: int) -> Floats:
        """Scores `[num_layers, num_experts]`; the largest is evicted first."""


class Lru:
    """Least recently used; a load counts as a use, so that a prefetched expert is not the next victim."""

    comparable = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last_use = np.zeros((num_layers, num_experts))
        self._clock = 0

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Stamp the used experts in id order."""
        row = self._last_use[layer_idx]
        for expert_idx in sorted(ids):
            self._clock += 1
            row[expert_idx] = self._clock

    def announced(self, layer_idx: int) -> None:
        """Ignored: a use is a visit."""

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """Stamp the loaded expert."""
        self._clock += 1
        self._last_use[layer_idx, expert_idx] = self._clock

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Ignored: recency only."""

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """Ignored: a use is a visit."""

    def scores(self, current_layer: int) -> Floats:
        """Minus the time of the last use."""
        return -self._last_use


class Lfru(Lru):
    """Frequency over age: uses so far, divided by the uses and loads of any expert since its own last one."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._uses = np.zeros((num_layers, num_experts))

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Count one use per expert and visit."""
        super().visited(layer_idx, ids, tokens, num_next)
        self._uses[layer_idx, ids] += 1

    def scores(self, current_layer: int) -> Floats:
        """Minus uses per unit of age."""
        return -(self._uses + 1.0) / (self._clock - self._last_use + 1.0)


class Static:
    """Popularity: the counts given at the start, or, without any, the counts so far (then it is LFU)."""

    comparable = True

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._popularity = np.zeros((num_layers, num_experts))
        self._fixed = False

    def fix(self, popularity: Floats) -> None:
        """Use these counts `[num_layers, num_experts]` from now on."""
        self._popularity[...] = popularity
        self._fixed = True

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Count, unless the popularity was given."""
        if not self._fixed:
            self._popularity[layer_idx, ids] += 1

    def announced(self, layer_idx: int) -> None:
        """Ignored: a use is a visit."""

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """Ignored."""

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Ignored: popularity only."""

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """Use these from now on."""
        popularity = np.zeros_like(self._popularity)
        for row, of_layer in zip(popularity, rates, strict=True):
            row[: len(of_layer)] = of_layer
        self.fix(popularity)

    def scores(self, current_layer: int) -> Floats:
        """Minus the popularity."""
        return -self._popularity


class NextUse:
    """Expected number of layer steps until the next use: `d + (1 - p_f) * L / p_r`.

    d: steps until the expert's layer is next visited; L: MoE layers per pass; p_f: probability that this next visit
    uses it (a forecast where there is one, else p_r); p_r: reuse prior, for the visits after it. Using p_f for all
    later visits too is wrong: an expert surely not used next would then count as never used again.
    """

    comparable = True

    def __init__(self, num_layers: int, num_experts: int, prior: ReusePrior) -> None:
        self._num_layers = num_layers
        self._prior = prior
        self._num_next = 1
        self._forecast: dict[int, Floats] = {}
        self._wait = np.zeros((num_layers, num_experts))  # (1 - p_f) * L / p_r, refreshed where `_outdated`
        self._outdated = set(range(num_layers))
        layers = np.arange(num_layers)
        self._steps = [((layers - current - 1) % num_layers + 1.0)[:, None] for current in range(num_layers)]

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """What was forecast for this visit is over; the reuse prior has just learned from it."""
        self._forecast.pop(layer_idx, None)
        self._outdated.add(layer_idx)
        if num_next != self._num_next:
            self._num_next = num_next
            self._outdated.update(range(self._num_layers))

    def announced(self, layer_idx: int) -> None:
        """What follows the announced experts is likelier from now on."""
        self._outdated.add(layer_idx)

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """Ignored."""

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Set p_f for the layer's next visit."""
        if probabilities is None:
            if self._forecast.pop(layer_idx, None) is None:
                return
        else:
            p_next = np.full(self._wait.shape[1], P_MIN)
            # Not np.clip: it takes longer than both of these, on the path of every forecast.
            p_next[: len(probabilities)] = np.minimum(np.maximum(probabilities, P_MIN), P_MAX)
            self._forecast[layer_idx] = p_next
        self._outdated.add(layer_idx)

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """Ignored: the reuse prior goes by it."""

    def scores(self, current_layer: int) -> Floats:
        """The expected numbers of steps; the layer being visited is a whole pass away."""
        if self._outdated:
            layers = list(self._outdated)
            p_reuse = self._prior.probabilities(layers, self._num_next)
            wait = 1.0 - p_reuse
            for row, layer_idx in zip(wait, layers, strict=True):
                if layer_idx in self._forecast:
                    np.subtract(1.0, self._forecast[layer_idx], out=row)
            wait *= self._num_layers
            wait /= p_reuse
            for row, layer_idx in zip(wait, layers, strict=True):
                self._wait[layer_idx] = row
            self._outdated.clear()
        scores: Floats = self._wait + self._steps[current_layer]
        return scores


def create(name: EvictionName, num_layers: int, num_experts: int, prior: ReusePrior) -> Eviction:
    """The policy of that name; `prior` is the scheduler's, which keeps it learning."""
    if name == "next_use":
        return NextUse(num_layers, num_experts, prior)
    kinds: dict[str, type[Lru] | type[Static]] = {"lru": Lru, "lfru": Lfru, "static": Static}
    return kinds[name](num_layers, num_experts)
