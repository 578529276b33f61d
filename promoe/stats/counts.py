"""Frozen records of what was counted, per layer and per phase, with units; rates are derived from them.

A quantity whose denominator is zero (a hit rate without visits, bytes per token without tokens) is nan; in JSON, null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, ClassVar, Literal

from promoe.stats.records import combined, from_plain, to_plain
from promoe.units import ratio

Phase = Literal["prefill", "decode"]
Cause = Literal["demand", "prefetch"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counters that exist per layer and, summed, per phase. All start at zero."""

    _derived: ClassVar[tuple[str, ...]] = ("hit_rate", "ready_rate", "bytes_total", "bytes_pending", "wasted_share")
    """Properties that stand beside the fields in JSON."""
    layer_visits: int = 0
    """How many times an MoE layer computed; all experts of one layer in one pass are one visit."""
    needed: int = 0
    """Experts needed, summed over visits (an expert counts once per visit, however many tokens use it)."""
    hits: int = 0
    """Of these, how many were resident when the gate had chosen them."""
    ready: int = 0
    """Of these, how many had arrived when the layer came to compute them (hits included)."""
    stall_s: float = 0.0
    """Seconds in which compute waited for weights."""
    bytes_demand: int = 0
    """Bytes moved because a gate had chosen the expert."""
    bytes_prefetched: int = 0
    """Bytes moved because a prediction said so."""
    bytes_prefetch_used: int = 0
    """The prefetched bytes whose expert was needed while it was in its slot."""
    bytes_wasted: int = 0
    """Bytes that were moved and never used: evicted, withdrawn or failed before any use."""
    bytes_wasted_demand: int = 0
    """The wasted bytes that were fetched on demand, after a gate's hint that no visit followed."""
    evictions: int = 0
    """Experts of this layer dropped from their slots to make room."""

    @property
    def hit_rate(self) -> float:
        """Share (0..1) of needed experts that were resident at gate time; nan without visits."""
        return ratio(self.hits, self.needed)

    @property
    def ready_rate(self) -> float:
        """Share (0..1) of needed experts that had arrived by the time the layer computed them; nan without visits."""
        return ratio(self.ready, self.needed)

    @property
    def bytes_total(self) -> int:
        """Bytes that the link moved, for whatever cause."""
        return self.bytes_demand + self.bytes_prefetched

    @property
    def bytes_wasted_prefetch(self) -> int:
        """The prefetched bytes that were never used."""
        return self.bytes_wasted - self.bytes_wasted_demand

    @property
    def bytes_used(self) -> int:
        """The moved bytes that were not wasted."""
        return self.bytes_total - self.bytes_wasted

    @property
    def bytes_pending(self) -> int:
        """Prefetched bytes that may still be used or wasted; at least 0.

        Bytes that were prefetched in one phase, or before a reset, may be used in the next one, which then settles more
        bytes than it moved.
        """
        return max(0, self.bytes_prefetched - self.bytes_prefetch_used - self.bytes_wasted_prefetch)

    @property
    def wasted_share(self) -> float:
        """Share (0..1) that was wasted of the prefetched bytes that are not pending; nan without any."""
        return ratio(self.bytes_wasted_prefetch, self.bytes_wasted_prefetch + self.bytes_prefetch_used)


@dataclass(frozen=True, kw_only=True)
class LayerStats(Counts):
    """One MoE layer in one phase."""

    expert_counts: tuple[int, ...] = ()
    """The number of visits that needed each expert."""


@dataclass(frozen=True, kw_only=True)
class PhaseStats(Counts):
    """One phase (prefill, decode) or their total: the sums over layers, and counters of whole passes."""

    _derived: ClassVar[tuple[str, ...]] = (
        *Counts._derived,
        *("pass_s", "stall_share", "bytes_per_token", "mb_per_token", "prefetch_on_share"),
    )
    """Properties that stand beside the fields in JSON."""
    passes: int = 0
    """Forward passes of the model that ended normally."""
    passes_aborted: int = 0
    """Passes that ended with an exception; their visits and bytes are counted, their time and tokens are not."""
    tokens: int = 0
    """Tokens processed by these passes, over all sequences, padding excluded."""
    sequences: int = 0
    """Sequences, summed over passes: `passes x batch` for a fixed batch."""
    duration_s: float = 0.0
    """Seconds that these passes took, stalls included."""
    predictor_s: float = 0.0
    """Seconds that predictors computed: beside the layers, or between them if no core is free."""
    predictor_calls: int = 0
    """Times a predictor ran."""
    prefetch_on_visits: int = 0
    """Layer visits during which prefetch was switched on."""
    prefetch_switches: int = 0
    """Times prefetch switched itself on or off."""
    failures_demand: int = 0
    """Demand transfers that failed (each raised in the forward that needed it)."""
    failures_prefetch: int = 0
    """Speculative transfers that failed (not raised; fetched again only on demand)."""
    stale_completions: int = 0
    """Transfers that completed after their slot had been given up; ignored."""
    layers: tuple[LayerStats, ...] = ()
    """The same per MoE layer, in model order."""

    @property
    def pass_s(self) -> float:
        """Mean seconds per pass: TPOT in decode, about TTFT in prefill; nan without passes."""
        return ratio(self.duration_s, self.passes)

    @property
    def stall_per_pass_s(self) -> float:
        """Mean seconds per pass in which compute waited; nan without passes."""
        return ratio(self.stall_s, self.passes)

    @property
    def stall_share(self) -> float:
        """Share (0..1) of the passes' time in which compute waited; nan without passes."""
        return ratio(self.stall_s, self.duration_s)

    @property
    def bytes_per_token(self) -> float:
        """Bytes moved per token, for whatever cause; nan without tokens."""
        return ratio(self.bytes_total, self.tokens)

    @property
    def mb_per_token(self) -> float:
        """Bytes moved per token in MB (10^6 bytes); nan without tokens."""
        return self.bytes_per_token / 1e6

    @property
    def prefetch_on_share(self) -> float:
        """Share (0..1) of layer visits during which prefetch was on; nan without visits."""
        return ratio(self.prefetch_on_visits, self.layer_visits)

    @property
    def expert_counts(self) -> tuple[tuple[int, ...], ...]:
        """The number of visits that needed each expert, `[layer][expert]`: the heat map."""
        return tuple(layer.expert_counts for layer in self.layers)

    def plus(self, other: PhaseStats) -> PhaseStats:
        """Return the sum of two phases of the same model."""
        return combined(add, self, other)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the derived rates beside them (null if they have no value)."""
        values: dict[str, Any] = to_plain(self)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PhaseStats:
        """Return what `to_json` was called on; derived values in `values` are ignored.

        Raises:
            ValueError: something is missing, or of another type.
        """
        phase: PhaseStats = from_plain(cls, dict(values), "phase")
        return phase


@dataclass(frozen=True, kw_only=True)
class ForecastStats:
    """How accurate forecasts were that came `steps_ahead` layer visits early. Only visits of decode are scored."""

    steps_ahead: int
    """Layer visits from when a forecast came to the visit that it was about: the distance k."""
    visits: int = 0
    """Visits that had such a forecast."""
    needed: int = 0
    """Experts that these visits needed."""
    named: int = 0
    """Of these, how many the forecast named. It names as many experts as the visit needed: its most probable ones."""
    by_chance: float = 0.0
    """How many a random choice of as many experts would have named, on average."""

    @property
    def accuracy(self) -> float:
        """Share (0..1) of the needed experts that were named; nan without any."""
        return ratio(self.named, self.needed)

    @property
    def chance(self) -> float:
        """Share (0..1) that a random choice would have named; nan without any."""
        return ratio(self.by_chance, self.needed)
