"""A deterministic simulation: the real scheduler, generated routing, and a link that moves a number of chunks per layer step.

No clock: a layer's computation lasts as long as `chunks_per_step` chunks take, and waiting is counted in chunks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from promoe.scheduler import Lease, PoolSpec, Scheduler, SchedulerConfig

Probabilities = npt.NDArray[np.float64]
Forecaster = Callable[[int, int], "Probabilities | None"]
"""(token, layer) forecast -> probabilities `[num_experts]`, or None for no forecast."""


class Tally:
    """An observer that counts what was moved, used and wasted."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        self.wasted_bytes: Counter[str] = Counter()
        self.used = 0
        self.evictions = 0
        self.failures: Counter[str] = Counter()
        self.stale = 0
        self.scored: list[tuple[int, int, int, float]] = []

    @property
    def moved_bytes(self) -> int:
        return sum(self.moved.values())

    def transferred(self, layer_idx: int, cause: str, nbytes: int) -> None:
        self.moved[cause] += nbytes

    def prefetch_used(self, layer_idx: int, nbytes: int) -> None:
        self.used += nbytes

    def wasted(self, layer_idx: int, nbytes: int, cause: str) -> None:
        self.wasted_bytes[cause] += nbytes

    def evicted(self, layer_idx: int) -> None:
        self.evictions += 1

    def failed(self, cause: str) -> None:
        self.failures[cause] += 1

    def forecast_scored(self, steps_ahead: int, needed: int, named: int, by_chance: float) -> None:
        self.scored.append((steps_ahead, needed, named, by_chance))

    def stale_completion(self) -> None:
        self.stale += 1


@dataclass
class Routing:
    """The experts that each token uses in each layer, and how probable each was, if the generator knows it."""

    num_experts: int
    ids: list[list[list[int]]]  # [num_tokens][num_layers] -> distinct experts
    probabilities: Probabilities | None = None  # [num_tokens, num_layers, num_experts], given the token's topic

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_layers(self) -> int:
        return len(self.ids[0])

    def used(self, token: int, layer_idx: int) -> Probabilities:
        row = np.zeros(self.num_experts)
        row[self.ids[token][layer_idx]] = 1.0
        return row


def markov_routing(
    seed: int, num_tokens: int, num_layers: int = 6, num_experts: int = 32, top_k: int = 4, persistence: float = 0.4
) -> Routing:
    """Top-k routing: each expert of a token is kept for the next one with `persistence`, else drawn by popularity."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(num_experts, 0.7), size=num_layers)
    ids: list[list[list[int]]] = []
    for token in range(num_tokens):
        row: list[list[int]] = []
        for layer_idx in range(num_layers):
            kept = [e for e in ids[-1][layer_idx] if rng.random() < persistence] if token else []
            weights = popularity[layer_idx] + 1e-6
            weights[kept] = 0.0
            fresh = rng.choice(num_experts, top_k - len(kept), replace=False, p=weights / weights.sum())
            row.append(sorted(kept + fresh.tolist()))
        ids.append(row)
    return Routing(num_experts, ids)


def topic_routing(
    seed: int,
    num_tokens: int,
    num_layers: int = 6,
    num_experts: int = 32,
    num_topics: int = 6,
    persistence: float = 0.8,
) -> Routing:
    """Every expert is used with a known probability that depends on the token's topic, a Markov chain."""
    rng = np.random.default_rng(seed)
    by_topic = rng.beta(0.15, 1.0, size=(num_topics, num_layers, num_experts))
    topics = [0]
    while len(topics) < num_tokens:
        topics.append(topics[-1] if rng.random() < persistence else int(rng.integers(num_topics)))
    probabilities = by_topic[topics]
    used = rng.random(probabilities.shape) < probabilities
    used[~used.any(axis=2), 0] = True
    return Routing(num_experts, [[np.flatnonzero(u).tolist() for u in token] for token in used], probabilities)


@dataclass
class Replay:
    """A run: feed it tokens, read `needed`, `hits`, `ready`, `waited` (chunks) and `tally`.

    Args:
        routing: what is used.
        config: of the scheduler.
        forecaster: asked at each visit about the layers `lookaheads` steps ahead.
        lookaheads: steps ahead that are forecast.
        chunks_per_step: chunks that the link moves while a layer computes.
        depth: chunks in flight at a time.
        gate_lead: chunks that the link moves between a gate and its experts' forward.
    """

    routing: Routing
    config: SchedulerConfig
    forecaster: Forecaster | None = None
    lookaheads: Sequence[int] = (3, 2, 1)
    chunks_per_step: int = 4
    depth: int = 2
    gate_lead: int = 0
    needed: int = 0
    hits: int = 0
    ready: int = 0
    waited: int = 0
    victims: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally()
        self.scheduler = Scheduler(self.config, self.tally)
        self._in_flight: deque[Lease] = deque()

    def run(self) -> Replay:
        for token in range(self.routing.num_tokens):
            for layer_idx in range(self.routing.num_layers):
                self.step(token, layer_idx)
        return self

    def step(self, token: int, layer_idx: int) -> None:
        """Run one layer visit: hint, visit, forecasts, and the transfers that happen while it computes."""
        ids = self.routing.ids[token][layer_idx]
        scheduler = self.scheduler
        self.needed += len(ids)
        self.hits += scheduler.hint(layer_idx, ids)
        self._move(self.gate_lead)
        visit = scheduler.begin_visit(layer_idx, ids)
        visit.admit()
        group = visit.ready()
        self.ready += len(group)
        while not visit.finished:
            visit.release(group)
            visit.admit()
            group = visit.ready()
            if not group and not visit.finished:
                self.waited += 1
                assert self._move(1), "a visit waits and nothing moves"
                group = visit.ready()
        visit.close()
        self._forecast(token, layer_idx)
        self._move(self.chunks_per_step)

    def _forecast(self, token: int, layer_idx: int) -> None:
        if self.forecaster is None:
            return
        num_layers = self.routing.num_layers
        for steps_ahead in self.lookaheads:
            later, target = divmod(token * num_layers + layer_idx + steps_ahead, num_layers)
            if later < self.routing.num_tokens:
                probabilities = self.forecaster(later, target)
                if probabilities is not None:
                    self.scheduler.forecast(steps_ahead, target, probabilities)

    def _move(self, count: int) -> int:
        for moved in range(count):
            self._in_flight.extend(self.scheduler.next_chunks(self.depth - len(self._in_flight)))
            if not self._in_flight:
                return moved
            self.scheduler.chunk_done(self._in_flight.popleft())
        return count

    @property
    def hit_rate(self) -> float:
        return self.hits / self.needed

    @property
    def ready_rate(self) -> float:
        return self.ready / self.needed


def global_pool(routing: Routing, cache_rate: float, num_chunks: int = 3, **switches: object) -> SchedulerConfig:
    """Return one pool for all layers, with slots for this share of all experts."""
    num_layers, num_experts = routing.num_layers, routing.num_experts
    return SchedulerConfig(
        num_experts=[num_experts] * num_layers,
        chunk_bytes=[(100,) * num_chunks] * num_layers,
        pools=[PoolSpec(max(1, round(cache_rate * num_layers * num_experts)), tuple(range(num_layers)))],
        strict=True,
        **switches,  # type: ignore[arg-type]
    )


# -- predictors ---------------------------------------------------------------------------------------------------


def oracle(routing: Routing) -> Forecaster:
    """Return forecasts that are always right."""
    return routing.used


def exact(routing: Routing) -> Forecaster:
    """Return the true probabilities, given the topic."""
    assert routing.probabilities is not None
    probabilities = routing.probabilities
    return lambda token, layer_idx: probabilities[token, layer_idx]


def good(routing: Routing, seed: int, precision: float = 0.85) -> Forecaster:
    """Return forecasts of as many experts as are used, each right with this probability, the same at each lookahead."""

    def forecast(token: int, layer_idx: int) -> Probabilities:
        rng = np.random.default_rng((seed, token, layer_idx))
        used = routing.used(token, layer_idx)
        right, wrong = np.flatnonzero(used == 1), np.flatnonzero(used == 0)
        num_wrong = int((rng.random(len(right)) >= precision).sum())
        named = np.full(routing.num_experts, 0.02)
        named[rng.permutation(right)[num_wrong:]] = 0.9
        named[rng.permutation(wrong)[:num_wrong]] = 0.9
        return named

    return forecast


def noise(routing: Routing, seed: int, top_k: int | None = None) -> Forecaster:
    """Return random probabilities, or, with `top_k`, certainty about random experts."""
    rng = np.random.default_rng(seed)

    def forecast(token: int, layer_idx: int) -> Probabilities:
        if top_k is None:
            return rng.random(routing.num_experts)
        row = np.zeros(routing.num_experts)
        row[rng.permutation(routing.num_experts)[:top_k]] = 1.0
        return row

    return forecast


def hostile(routing: Routing, seed: int, num_named: int = 4) -> Forecaster:
    """Return forecasts that are certain and always wrong."""
    rng = np.random.default_rng(seed)

    def forecast(token: int, layer_idx: int) -> Probabilities:
        row = np.zeros(routing.num_experts)
        row[rng.permutation(np.flatnonzero(routing.used(token, layer_idx) == 0))[:num_named]] = 1.0
        return row

    return forecast
