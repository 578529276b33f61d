"""Eviction policies: they score experts, and the resident with the largest score is evicted.

A policy is told of layer visits and loads, in order. It is asked at most once per layer event, so it returns the scores
of all experts at once. It never sees slots or pins.

`next_use` lets the layer that is being visited make room first: its experts that have run are a whole pass away from
their next use, so they leave before those of the layers to come. A prompt that uses all experts does not thrash then.
Experts of the layer that have not run yet are pinned or hinted, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .config import EvictionName
from .reuse import P_MAX, P_MIN, Floats, ReusePrior


class Eviction(Protocol):
    """A policy that scores experts `[num_layers, num_experts]`. What it is told of is ignored by default."""

    comparable: bool
    """Whether scores of absent and resident experts may be compared, so that a prefetch can be refused its victim."""

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Note that a layer is visited with these experts; its next visit is expected to have `num_next` tokens."""

    def announced(self, layer_idx: int) -> None:
        """Note that the reuse prior has learned something of a layer, for example what its gate has chosen."""
        return

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """Note that an expert is assigned a slot."""
        return

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Take calibrated probabilities of use `[num_experts]` at the layer's next visit; None: forget them."""
        return

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """Take how often experts were used before, `[num_layers][num_experts]`; the reuse prior knows it already."""
        return

    def scores(self, current_layer: int) -> Floats:
        """Return scores `[num_layers, num_experts]`; the largest is evicted first."""
        ...


class Lru(Eviction):
    """Least recently used. A load counts as a use, so that a prefetched expert is not the next victim."""

    comparable = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last_use = np.zeros((num_layers, num_experts))
        self._clock = 0

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Give the used experts a new time, in order of id."""
        row = self._last_use[layer_idx]
        for expert_idx in sorted(ids):
            self._clock += 1
            row[expert_idx] = self._clock

    def loading(self, layer_idx: int, expert_idx: int) -> None:
        """Give the loaded expert a new time."""
        self._clock += 1
        self._last_use[layer_idx, expert_idx] = self._clock

    def scores(self, current_layer: int) -> Floats:
        """Return minus the time of the last use."""
        return -self._last_use


class Lfru(Lru):
    """Frequency over age: the uses so far, divided by the uses and loads of all experts since its own last one."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._uses = np.zeros((num_layers, num_experts))

    def visited(self, layer_idx: int, ids: Sequence[int], tokens: Sequence[Sequence[int]], num_next: int) -> None:
        """Count one use per expert and visit."""
        super().visited(layer_idx, ids, tokens, num_next)
        self._uses[layer_idx, ids] += 1

    def scores(self, current_layer: int) -> Floats:
        """Return minus the uses per unit of age."""
        return -(self._uses + 1.0) / (self._clock - self._last_use + 1.0)


class Static(Eviction):
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
        """Count the uses, unless the popularity was given."""
        if not self._fixed:
            self._popularity[layer_idx, ids] += 1

    def popular(self, rates: Sequence[Sequence[float]]) -> None:
        """Use these rates from now on."""
        popularity = np.zeros_like(self._popularity)
        for row, of_layer in zip(popularity, rates, strict=True):
            row[: len(of_layer)] = of_layer
        self.fix(popularity)

    def scores(self, current_layer: int) -> Floats:
        """Return minus the popularity."""
        return -self._popularity


class NextUse(Eviction):
    """The expected number of layer steps until the next use: `d + (1 - p_f) * L / p_r`.

    d: steps until the expert's layer is next visited; L: MoE layers per pass; p_f: the probability that this next visit
    uses it (a forecast if there is one, else p_r); p_r: the reuse prior, for the visits after it. It would be wrong to
    use p_f for all later visits too: an expert that is surely not used next would count as never used again.
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
        """Forget the forecast for this visit; the reuse prior has just learned from it."""
        self._forecast.pop(layer_idx, None)
        self._outdated.add(layer_idx)
        if num_next != self._num_next:
            self._num_next = num_next
            self._outdated.update(range(self._num_layers))

    def announced(self, layer_idx: int) -> None:
        """Compute the layer's scores again: what follows the announced experts is more probable from now on."""
        self._outdated.add(layer_idx)

    def forecast(self, layer_idx: int, probabilities: Floats | None) -> None:
        """Set p_f for the layer's next visit."""
        if probabilities is None:
            if self._forecast.pop(layer_idx, None) is None:
                return
        else:
            p_next = np.full(self._wait.shape[1], P_MIN)
            # Not np.clip: it takes longer than both of these, and every forecast waits for it.
            p_next[: len(probabilities)] = np.minimum(np.maximum(probabilities, P_MIN), P_MAX)
            self._forecast[layer_idx] = p_next
        self._outdated.add(layer_idx)

    def scores(self, current_layer: int) -> Floats:
        """Return the expected numbers of steps; the layer being visited is a whole pass away."""
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
    """Return the policy of that name. `prior` is the scheduler's, which makes it learn."""
    if name == "next_use":
        return NextUse(num_layers, num_experts, prior)
    kinds: dict[str, type[Lru] | type[Static]] = {"lru": Lru, "lfru": Lfru, "static": Static}
    return kinds[name](num_layers, num_experts)
