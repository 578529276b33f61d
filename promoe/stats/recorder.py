"""Counts what happens while a model runs.

A `Recorder` is told everything; it knows no model, slot, lock or clock. A forward waits for its methods (about a
microsecond each), so they only add to plain numbers and lists. It is not thread-safe: call it with one lock held, or
from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from promoe.stats.counts import Cause, Counts, ForecastStats, LayerStats, Phase, PhaseStats
from promoe.stats.over_time import OverTime, Stretch

_LAYER_COUNTS = tuple(field.name for field in fields(Counts))


class Recorder:
    """Counts per phase and MoE layer.

    Visits are counted in the phase that they name. Everything else is counted in the phase of the pass begun last
    (prefill before the first one), including what link workers finish between passes. If several threads run passes of
    different phases at once, the phase of moved bytes is approximate; the totals are exact.

    Args:
        num_experts: routed experts of each MoE layer.
        expert_bytes: bytes of one expert of each MoE layer.
    """

    def __init__(self, num_experts: Sequence[int], expert_bytes: Sequence[int]) -> None:
        assert len(num_experts) == len(expert_bytes), (len(num_experts), len(expert_bytes))
        self.num_experts = tuple(num_experts)
        self.expert_bytes = tuple(expert_bytes)
        self._open: dict[int, tuple[Phase, int, int]] = {}
        self._next_pass = 0
        self._prefetch_on = False
        self._phase: Phase = "prefill"
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero. Open passes stay open, and prefetch stays on or off."""
        self._tallies: dict[Phase, _Tally] = {
            "prefill": _Tally(self.num_experts),
            "decode": _Tally(self.num_experts),
        }
        self._now = self._tallies[self._phase]
        self._over_time = OverTime(self._tallies["decode"].so_far)
        self._forecasts: dict[int, _ForecastCounts] = {}

    def begin_pass(self, phase: Phase, num_tokens: int, num_sequences: int) -> int:
        """Begin a forward pass of the model; from now on counts go to `phase`.

        Args:
            phase: "prefill" or "decode".
            num_tokens: tokens of the pass over all sequences, padding excluded.
            num_sequences: sequences (batch size).

        Returns:
            The pass's number, for `end_pass` when passes of several threads overlap.
        """
        if phase == "decode":
            self._over_time.pass_begins()
        self._phase = phase
        self._now = self._tallies[phase]
        self._next_pass += 1
        self._open[self._next_pass] = (phase, num_tokens, num_sequences)
        return self._next_pass

    def outside(self) -> None:
        """Count in prefill from now on: experts are used outside of any pass (an encoder or a block that is called alone)."""
        self._phase = "prefill"
        self._now = self._tallies["prefill"]

    def end_pass(self, duration_s: float, pass_idx: int | None = None, *, aborted: bool = False) -> None:
        """End a pass. Call it in a `finally`: each begun pass ends once.

        Args:
            duration_s: seconds since `begin_pass`, stalls included.
            pass_idx: what `begin_pass` returned; None: the pass begun last.
            aborted: whether it ended with an exception. Then its time and tokens are not counted, so that means stay
                right.
        """
        assert self._open, f"end_pass({pass_idx}) without a begun pass"
        phase, num_tokens, num_sequences = self._open.popitem()[1] if pass_idx is None else self._open.pop(pass_idx)
        tally = self._tallies[phase]
        if aborted:
            tally.passes_aborted += 1
            return
        tally.passes += 1
        tally.tokens += num_tokens
        tally.sequences += num_sequences
        tally.duration_s += duration_s

    def visit(
        self,
        layer_idx: int,
        needed: Sequence[int],
        hits: int,
        ready: int,
        stall_s: float,
        phase: Phase | None = None,
    ) -> None:
        """Count a visit: an MoE layer has computed its experts.

        Args:
            layer_idx: MoE layer.
            needed: ids of the experts that it needed, each once.
            hits: how many were resident at gate time.
            ready: how many it computed without waiting (normally at least `hits`).
            stall_s: seconds that compute waited in this visit.
            phase: the phase of its pass; None: that of the pass begun last.
        """
        now = self._now if phase is None else self._tallies[phase]
        now.layer_visits[layer_idx] += 1
        now.needed[layer_idx] += len(needed)
        now.hits[layer_idx] += hits
        now.ready[layer_idx] += ready
        now.stall_s[layer_idx] += stall_s
        if self._prefetch_on:
            now.prefetch_on_visits += 1
        counts = now.expert_counts[layer_idx]
        for expert_idx in needed:
            counts[expert_idx] += 1

    def stall_s(self, phase: Phase) -> float:
        """Return the seconds that compute has waited in passes of a phase."""
        return sum(self._tallies[phase].stall_s)

    def fetched_bytes(self, phase: Phase) -> int:
        """Return the bytes that passes of a phase needed: those moved on demand, and the prefetched ones that were used."""
        tally = self._tallies[phase]
        return sum(tally.bytes_demand) + sum(tally.bytes_prefetch_used)

    def passes_aborted(self, phase: Phase) -> int:
        """Return how many passes of a phase ended with an exception."""
        return self._tallies[phase].passes_aborted

    def transferred(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """Count bytes of an expert of this layer that the link moved. `cause` says why they were sent."""
        if cause == "demand":
            self._now.bytes_demand[layer_idx] += nbytes
        else:
            self._now.bytes_prefetched[layer_idx] += nbytes

    def prefetch_used(self, layer_idx: int, nbytes: int) -> None:
        """Count prefetched bytes that were needed, for the first time since they arrived."""
        self._now.bytes_prefetch_used[layer_idx] += nbytes

    def wasted(self, layer_idx: int, nbytes: int, cause: Cause = "prefetch") -> None:
        """Count bytes that were moved and never used: evicted, withdrawn or failed before use.

        Args:
            layer_idx: MoE layer.
            nbytes: how many bytes.
            cause: why they were moved; "demand" for a gate's hint that no visit followed.
        """
        now = self._now
        now.bytes_wasted[layer_idx] += nbytes
        if cause == "demand":
            now.bytes_wasted_demand[layer_idx] += nbytes

    def evicted(self, layer_idx: int) -> None:
        """Count a resident expert of this layer that was dropped to make room."""
        self._now.evictions[layer_idx] += 1

    def failed(self, cause: Cause) -> None:
        """Count a transfer that failed."""
        if cause == "demand":
            self._now.failures_demand += 1
        else:
            self._now.failures_prefetch += 1

    def prefetch_switched(self, on: bool) -> None:
        """Note that prefetch is on or off from now on (off at first). Repeating the present state is not a switch."""
        if on != self._prefetch_on:
            self._prefetch_on = on
            self._now.prefetch_switches += 1

    def predictor_time(self, seconds: float) -> None:
        """Count a predictor call that took `seconds`."""
        self._now.predictor_calls += 1
        self._now.predictor_s += seconds

    def forecast_scored(self, steps_ahead: int, needed: int, named: int, by_chance: float) -> None:
        """Count a forecast whose visit has come; see `ForecastStats`.

        Args:
            steps_ahead: layer visits from when the forecast came to this one.
            needed: experts that the visit needed.
            named: how many of them the forecast named.
            by_chance: how many of them a random choice would have named, on average.
        """
        scored = self._forecasts.setdefault(steps_ahead, _ForecastCounts())
        scored.visits += 1
        scored.needed += needed
        scored.named += named
        scored.by_chance += by_chance

    def stale_completion(self) -> None:
        """Count a transfer that completed after its lease had become invalid, and was ignored."""
        self._now.stale_completions += 1

    def phase_stats(self, phase: Phase) -> PhaseStats:
        """Return a frozen copy of one phase's counters."""
        return self._tallies[phase].frozen()

    def forecast_stats(self) -> tuple[ForecastStats, ...]:
        """Return how accurate forecasts were, per distance, nearest first."""
        return tuple(ForecastStats(steps_ahead=k, **vars(scored)) for k, scored in sorted(self._forecasts.items()))

    def over_time(self) -> tuple[Stretch, ...]:
        """Return decode, cut into stretches."""
        return self._over_time.stretches()


class _ForecastCounts:
    """The counters of forecasts of one distance, as they become a ForecastStats."""

    def __init__(self) -> None:
        self.visits = self.needed = self.named = 0
        self.by_chance = 0.0


class _Tally:
    """The counters of one phase, as they become a PhaseStats: lists over layers for the fields of Counts, else numbers."""

    def __init__(self, num_experts: Sequence[int]) -> None:
        zeros, zeros_s = [0] * len(num_experts), [0.0] * len(num_experts)
        self.layer_visits = zeros.copy()
        self.needed = zeros.copy()
        self.hits = zeros.copy()
        self.ready = zeros.copy()
        self.stall_s = zeros_s
        self.bytes_demand = zeros.copy()
        self.bytes_prefetched = zeros.copy()
        self.bytes_prefetch_used = zeros.copy()
        self.bytes_wasted = zeros.copy()
        self.bytes_wasted_demand = zeros.copy()
        self.evictions = zeros.copy()
        self.expert_counts = [[0] * n for n in num_experts]
        self.passes = 0
        self.passes_aborted = 0
        self.tokens = 0
        self.sequences = 0
        self.duration_s = 0.0
        self.predictor_s = 0.0
        self.predictor_calls = 0
        self.prefetch_on_visits = 0
        self.prefetch_switches = 0
        self.failures_demand = 0
        self.failures_prefetch = 0
        self.stale_completions = 0

    def frozen(self) -> PhaseStats:
        values: dict[str, Any] = dict(vars(self))
        expert_counts = values.pop("expert_counts")
        per_layer = {name: values.pop(name) for name in _LAYER_COUNTS}
        layers = tuple(
            LayerStats(expert_counts=tuple(counts), **{name: per_layer[name][i] for name in _LAYER_COUNTS})
            for i, counts in enumerate(expert_counts)
        )
        return PhaseStats(layers=layers, **values, **{name: sum(per_layer[name]) for name in _LAYER_COUNTS})

    def so_far(self, passes: int) -> Stretch:
        """Return what was counted so far, as one stretch of so many passes."""
        return Stretch(
            passes, sum(self.needed), sum(self.hits), sum(self.ready), tuple(chain.from_iterable(self.expert_counts))
        )
