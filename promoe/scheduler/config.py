"""The sizes and switches of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

EvictionName = Literal["lru", "lfru", "static", "next_use"]
Cause = Literal["demand", "prefetch"]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool of equal slots and the MoE layers whose experts it holds."""

    num_slots: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.num_slots >= 1, self
        assert self.layers, self


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes of the model and switches of the policy.

    Args:
        num_experts: routed experts of each MoE layer.
        chunk_bytes: per MoE layer, the bytes of each chunk of one of its experts, in transfer order.
        pools: every layer belongs to exactly one.
        eviction: which resident expert makes room.
        reorder: run (and fetch) resident experts first, then those in flight, then the rest (ProMoE's "reordered
            inference"). Off: ascending ids, each missing expert fetched when its turn comes, as offloading caches do.
        hints: act on the gate's ids before the experts' forward asks (ProMoE's "early preemption").
        prefetch: act on forecasts.
        min_probability: speculation below this calibrated probability is not sent.
        waste_share: of all bytes moved, what speculation may waste; the nearer it is to that, the surer it has to be.
        first_chunks: per MoE layer, how many of an expert's chunks, from the first on, are enough to begin computing it; 0, as
            everywhere if empty: it takes all of them.
        calibrate: correct forecasts by what they were worth so far (see `calibration`); off: take them at their word.
        strict: a completion with an outdated lease is an error (tests) instead of a counted event.
    """

    num_experts: Sequence[int]
    chunk_bytes: Sequence[tuple[int, ...]]
    pools: Sequence[PoolSpec]
    eviction: EvictionName = "next_use"
    reorder: bool = True
    hints: bool = True
    prefetch: bool = True
    min_probability: float = 0.5
    waste_share: float = 0.025
    first_chunks: Sequence[int] = ()
    calibrate: bool = True
    strict: bool = False
    expert_bytes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.num_experts) == len(self.chunk_bytes) > 0, (self.num_experts, len(self.chunk_bytes))
        assert all(chunks and min(chunks) > 0 for chunks in self.chunk_bytes), self.chunk_bytes
        if not self.first_chunks:
            object.__setattr__(self, "first_chunks", (0,) * self.num_layers)
        enough = zip(self.first_chunks, self.chunk_bytes, strict=True)
        assert all(0 <= first < len(chunks) for first, chunks in enough), (self.first_chunks, self.chunk_bytes)
        covered = sorted(layer for pool in self.pools for layer in pool.layers)
        assert covered == list(range(self.num_layers)), f"pools cover layers {covered} of {self.num_layers}"
        object.__setattr__(self, "expert_bytes", tuple(sum(chunks) for chunks in self.chunk_bytes))

    @property
    def num_layers(self) -> int:
        """MoE layers of the model."""
        return len(self.num_experts)


class Observer(Protocol):
    """Is told what happened; counts it. Calls come from inside scheduler operations and must not call back."""

    def transferred(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """A chunk arrived, whether or not its slot still wanted it. `cause` is what it was sent for."""

    def prefetch_used(self, layer_idx: int, nbytes: int) -> None:
        """Bytes that speculation had sent are in their slot and a visit asked for their expert."""

    def wasted(self, layer_idx: int, nbytes: int, cause: Cause) -> None:
        """Bytes sent for `cause` were dropped before any visit asked for their expert."""

    def evicted(self, layer_idx: int) -> None:
        """A complete expert gave up its slot."""

    def failed(self, cause: Cause) -> None:
        """A chunk could not be fetched."""

    def forecast_scored(self, steps_ahead: int, needed: int, named: int, by_chance: float) -> None:
        """A visit showed what a forecast that came `steps_ahead` visits before it was worth (see `accuracy`)."""

    def stale_completion(self) -> None:
        """A completion came with an outdated lease and was ignored."""


class NullObserver:
    """Counts nothing."""

    def transferred(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """Ignored."""

    def prefetch_used(self, layer_idx: int, nbytes: int) -> None:
        """Ignored."""

    def wasted(self, layer_idx: int, nbytes: int, cause: Cause) -> None:
        """Ignored."""

    def evicted(self, layer_idx: int) -> None:
        """Ignored."""

    def failed(self, cause: Cause) -> None:
        """Ignored."""

    def forecast_scored(self, steps_ahead: int, needed: int, named: int, by_chance: float) -> None:
        """Ignored."""

    def stale_completion(self) -> None:
        """Ignored."""
