"""Everything that was counted in a run, as one frozen record, and the summary of it as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from promoe.stats.counts import ForecastStats, PhaseStats
from promoe.stats.over_time import Stretch
from promoe.stats.recorder import Recorder
from promoe.stats.records import from_plain, to_plain
from promoe.stats.text_columns import labelled
from promoe.units import (
    DASH,
    aligned,
    format_megabytes,
    format_memory,
    format_seconds,
    format_share,
    ratio,
)


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Everything counted since the model was patched or `reset_stats()` was called (`model.promoe.stats()`).

    Rates and totals over both phases are attributes of this object (`stats.hit_rate`); each phase has the same ones
    (`stats.decode.hit_rate`), and `phase.layers` has them per layer.
    """

    _derived: ClassVar[tuple[str, ...]] = ("cache_rate", "total")
    """Properties that stand beside the fields in JSON."""
    num_experts: tuple[int, ...]
    """Routed experts of each MoE layer."""
    expert_bytes: tuple[int, ...]
    """Bytes of one expert of each MoE layer."""
    cache_slots: int
    """Slots of the expert cache, all pools together."""
    cache_bytes: int
    """Bytes of fast memory that these slots take."""
    link: str
    """A description of how bytes reach the slots."""
    policy: str
    """Eviction policy."""
    predictor: str | None
    """Kind of the predictor that prefetch uses; None: no prefetch."""
    store: str = ""
    """A description of where all experts always are."""
    kernels: str = ""
    """How experts were multiplied, if not exactly."""
    prefill: PhaseStats = field(repr=False)
    """Passes that read a prompt."""
    decode: PhaseStats = field(repr=False)
    """Passes that generate one token per sequence."""
    forecasts: tuple[ForecastStats, ...] = field(default=(), repr=False)
    """How accurate forecasts were, per distance, nearest first; empty without any."""
    over_time: tuple[Stretch, ...] = field(default=(), repr=False)
    """Decode, cut into stretches of equally many passes (the last may have fewer)."""

    @classmethod
    def of(
        cls,
        recorder: Recorder,
        *,
        cache_slots: int,
        cache_bytes: int,
        link: str,
        policy: str,
        predictor: str | None,
        store: str = "",
        kernels: str = "",
    ) -> Stats:
        """Return what `recorder` has counted so far, and the set-up that it was counted with.

        Call it with the lock held that guards the recorder.
        """
        return cls(
            num_experts=recorder.num_experts,
            expert_bytes=recorder.expert_bytes,
            cache_slots=cache_slots,
            cache_bytes=cache_bytes,
            link=link,
            policy=policy,
            predictor=predictor,
            store=store,
            kernels=kernels,
            prefill=recorder.phase_stats("prefill"),
            decode=recorder.phase_stats("decode"),
            forecasts=recorder.forecast_stats(),
            over_time=recorder.over_time(),
        )

    @cached_property
    def total(self) -> PhaseStats:
        """Prefill and decode together."""
        return self.prefill.plus(self.decode)

    @property
    def cache_rate(self) -> float:
        """Slots / all routed experts (at least 1: everything fits); nan for a model without experts."""
        return ratio(self.cache_slots, sum(self.num_experts))

    @property
    def hit_rate(self) -> float:
        """Share (0..1) of needed experts that were resident at gate time; nan without visits."""
        return self.total.hit_rate

    @property
    def ready_rate(self) -> float:
        """Share (0..1) of needed experts that had arrived when the layer computed them; nan without visits."""
        return self.total.ready_rate

    @property
    def stall_s(self) -> float:
        """Seconds in which compute waited for weights."""
        return self.total.stall_s

    @property
    def bytes_demand(self) -> int:
        """Bytes moved because a gate had chosen the expert."""
        return self.total.bytes_demand

    @property
    def bytes_prefetched(self) -> int:
        """Bytes moved because a prediction said so."""
        return self.total.bytes_prefetched

    @property
    def bytes_wasted(self) -> int:
        """Bytes that were moved and never used."""
        return self.total.bytes_wasted

    @property
    def evictions(self) -> int:
        """Experts dropped from their slots to make room."""
        return self.total.evictions

    @property
    def layer_visits(self) -> int:
        """How many times an MoE layer computed."""
        return self.total.layer_visits

    @property
    def prefetch_on_share(self) -> float:
        """Share (0..1) of layer visits during which prefetch was on; nan without visits."""
        return self.total.prefetch_on_share

    @property
    def ttft_s(self) -> float:
        """Mean seconds per prefill pass; nan without one."""
        return self.prefill.pass_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per decode pass, which is per output token of a sequence; nan without one.

        With a draft model or prompt lookup, a pass checks proposed tokens and may produce several.
        """
        return self.decode.pass_s

    def to_json(self) -> dict[str, Any]:
        """Return a dict of plain values for `json.dump`; `Stats.from_json` restores an equal object."""
        values: dict[str, Any] = to_plain(self)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Stats:
        """Return what `to_json` was called on; derived values in `values` are ignored.

        Raises:
            ValueError: something is missing, or of another type.
        """
        stats: Stats = from_plain(cls, dict(values), "stats")
        return stats

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the main numbers as text: (what, prefill, decode, total)."""
        return [(label, write(self.prefill), write(self.decode), write(self.total)) for label, write in _ROWS]

    def summary(self) -> str:
        """Return the main numbers on about fifteen aligned lines, as wide as the terminal."""
        experts = sum(self.num_experts)
        cache = (
            f"{self.cache_slots} slots for {experts} experts ({format_share(self.cache_rate)}), "
            f"{format_memory(self.cache_bytes)}; policy {self.policy}, predictor {self.predictor or 'none'}"
        )
        link = self.link + (f"; store {self.store}" if self.store else "")
        lines = labelled("cache", cache, _LABEL) + labelled("link", link, _LABEL)
        if self.kernels:
            lines += labelled("kernels", self.kernels, _LABEL)
        if self.cache_rate >= 1 and not self.total.layer_visits:  # nothing is counted if all experts are in memory
            return "\n".join(lines + self._troubles())
        table = [("", "prefill", "decode", "total"), *self.rows()]
        return "\n".join(lines + aligned(table, narrowest=10) + self._troubles())

    def _troubles(self) -> list[str]:
        t = self.total
        counts = (
            (t.failures_demand, "demand transfers failed"),
            (t.failures_prefetch, "prefetches failed"),
            (t.stale_completions, "late transfers ignored"),
            (t.passes_aborted, "passes aborted"),
        )
        found = ", ".join(f"{count} {what}" for count, what in counts if count)
        return labelled("trouble", found, _LABEL) if found else []

    def __str__(self) -> str:
        return self.summary()


_LABEL = 10  # characters


def _stall(phase: PhaseStats) -> str:
    if not phase.passes:
        return DASH
    return f"{format_seconds(phase.stall_per_pass_s)} = {format_share(phase.stall_share)}"


_ROWS: tuple[tuple[str, Callable[[PhaseStats], str]], ...] = (
    ("passes", lambda p: f"{p.passes:,}"),
    ("tokens", lambda p: f"{p.tokens:,}"),
    ("time per pass", lambda p: format_seconds(p.pass_s)),
    ("  of it stall", _stall),
    ("hit rate", lambda p: format_share(p.hit_rate)),
    ("ready rate", lambda p: format_share(p.ready_rate)),
    ("moved, MB per token", lambda p: format_megabytes(p.bytes_per_token)),
    ("  on demand", lambda p: format_megabytes(ratio(p.bytes_demand, p.tokens))),
    ("  prefetched", lambda p: format_megabytes(ratio(p.bytes_prefetched, p.tokens))),
    ("  prefetched in vain", lambda p: format_share(p.wasted_share)),
    ("evictions", lambda p: f"{p.evictions:,}"),
    ("prefetch on", lambda p: format_share(p.prefetch_on_share)),
)
