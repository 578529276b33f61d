"""What a scheduler is told: the names of experts, its sizes and switches, and who is told what happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

EvictionName = Literal["lru", "lfru", "static", "next_use"]
Cause = Literal["demand", "prefetch"]


class ExpertKey(NamedTuple):
    """The name of one routed expert.

    `layer_idx` counts the model's MoE layers in model order, 0..L-1; `expert_idx` counts the experts of that layer.
    """

    layer_idx: int
    expert_idx: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of slots of equal size, and the MoE layers whose experts it holds: the hot ones (`HotExperts`), or the others."""

    num_slots: int
    layers: tuple[int, ...]
    hot: bool = False

    def __post_init__(self) -> None:
        assert self.num_slots >= 1, self
        assert self.layers, self


@dataclass(frozen=True, slots=True)
class HotExperts:
    """Experts whose slots are of another size than those of the rest of their layer: often used ones, in more bits.

    Args:
        experts: their names. Every layer has some, and some others.
        chunk_bytes: per MoE layer, the bytes of each chunk of one of these experts, in transfer order.
        first_chunks: per MoE layer, as in `SchedulerConfig`.
    """

    experts: frozenset[ExpertKey]
    chunk_bytes: Sequence[tuple[int, ...]]
    first_chunks: Sequence[int] = ()

    @property
    def per_layer(self) -> Counter[int]:
        """How many experts of each MoE layer are hot."""
        return Counter(key.layer_idx for key in self.experts)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The sizes of the model and the switches of the policy.

    Args:
        num_experts: routed experts of each MoE layer.
        chunk_bytes: per MoE layer, the bytes of each chunk of one of its experts, in transfer order.
        pools: every layer belongs to exactly one of them; with `hot`, also to exactly one for hot experts.
        eviction: the policy that chooses which resident expert is evicted.
        reorder: run (and fetch) resident experts first, then those in flight, then the rest (ProMoE's "reordered
            inference"). Off: experts run in order of id, and each missing one is fetched when its turn comes, as
            offloading caches do.
        hints: act on the gate's ids before the experts' forward asks (ProMoE's "early preemption").
        prefetch: act on forecasts.
        min_probability: experts below this calibrated probability are not prefetched.
        waste_share: the share of all moved bytes that prefetch may waste. The closer the waste comes to it, the more
            probable an expert must be to be prefetched.
        first_chunks: per MoE layer, how many of an expert's first chunks are enough to start computing it. 0, or an
            empty sequence, means that all chunks are needed.
        calibrate: correct forecasts by how good they were so far (see `calibration`). Off: use them as they are.
        strict: raise on a completion with an outdated lease (for tests) instead of counting it.
        hot: experts with slots of another size; None: all experts of a layer are alike.

    Attributes:
        expert_bytes: per MoE layer, the bytes of one of its experts, on average.
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
    hot: HotExperts | None = None
    expert_bytes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_chunks(self.num_experts, self.chunk_bytes, self.first_chunks)
        if not self.first_chunks:
            object.__setattr__(self, "first_chunks", (0,) * self.num_layers)
        hot_layers: list[int] = []
        if (hot := self.hot) is not None:
            _check_chunks(self.num_experts, hot.chunk_bytes, hot.first_chunks)
            counts, hot_layers = hot.per_layer, list(range(self.num_layers))
            assert sorted(counts) == hot_layers, f"{counts} experts are hot, per layer"
            assert all(counts[layer] < of_all for layer, of_all in enumerate(self.num_experts)), counts
            assert all(key.expert_idx < self.num_experts[key.layer_idx] for key in hot.experts), hot.experts
        for kind, expected in ((False, list(range(self.num_layers))), (True, hot_layers)):
            covered = sorted(layer for pool in self.pools if pool.hot == kind for layer in pool.layers)
            assert covered == expected, f"pools cover layers {covered} of {self.num_layers}; hot: {kind}"
        object.__setattr__(self, "expert_bytes", self._mean_bytes())

    def _mean_bytes(self) -> tuple[int, ...]:
        sizes, hot = [sum(chunks) for chunks in self.chunk_bytes], self.hot
        if hot is not None:
            for layer, count in hot.per_layer.items():
                more = sum(hot.chunk_bytes[layer]) - sizes[layer]
                sizes[layer] = round(sizes[layer] + more * count / self.num_experts[layer])
        return tuple(sizes)

    def is_hot(self, key: ExpertKey) -> bool:
        """Return whether an expert is one of the hot ones."""
        return self.hot is not None and key in self.hot.experts

    def chunk_bytes_of(self, key: ExpertKey) -> tuple[int, ...]:
        """Return the bytes of each chunk of an expert, in transfer order."""
        hot = self.hot
        return (self if hot is None or key not in hot.experts else hot).chunk_bytes[key.layer_idx]

    def first_chunks_of(self, key: ExpertKey) -> int:
        """Return how many of an expert's first chunks are enough to start computing it; 0: all of them."""
        hot = self.hot
        first_chunks = (self if hot is None or key not in hot.experts else hot).first_chunks
        return first_chunks[key.layer_idx] if first_chunks else 0

    @property
    def num_layers(self) -> int:
        """The number of MoE layers of the model."""
        return len(self.num_experts)


def _check_chunks(
    num_experts: Sequence[int], chunk_bytes: Sequence[tuple[int, ...]], first_chunks: Sequence[int]
) -> None:
    assert len(num_experts) == len(chunk_bytes) > 0, (num_experts, len(chunk_bytes))
    assert all(chunks and min(chunks) > 0 for chunks in chunk_bytes), chunk_bytes
    enough = zip(first_chunks, chunk_bytes, strict=True) if first_chunks else ()
    assert all(0 <= first < len(chunks) for first, chunks in enough), (first_chunks, chunk_bytes)


class Observer(Protocol):
    """Counts what happens. Calls come from inside scheduler operations and must not call back.

    The methods do nothing by default.
    """

    def transferred(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """Count a chunk that arrived, whether or not its slot still wanted it. `cause` says why it was sent."""
        return

    def prefetch_used(self, layer_idx: int, nbytes: int) -> None:
        """Count prefetched bytes that are in their slot and whose expert a visit asked for."""
        return

    def wasted(self, layer_idx: int, nbytes: int, cause: Cause) -> None:
        """Count bytes that were sent for `cause` and dropped before any visit asked for their expert."""
        return

    def evicted(self, layer_idx: int) -> None:
        """Count a complete expert that lost its slot."""
        return

    def failed(self, cause: Cause) -> None:
        """Count a chunk that could not be fetched."""
        return

    def forecast_scored(self, steps_ahead: int, needed: int, named: int, by_chance: float) -> None:
        """Count what a forecast was worth that came `steps_ahead` layer visits early (see `ForecastAccuracy`)."""
        return

    def stale_completion(self) -> None:
        """Count a completion that came with an outdated lease and was ignored."""
        return


class NullObserver(Observer):
    """An observer that counts nothing."""
