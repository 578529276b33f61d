"""Writes the sentences of reports: what the numbers mean, and what to do, each advice with the rule behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from promoe.stats.counts import PhaseStats
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.units import (
    format_bandwidth,
    format_megabytes,
    format_memory,
    format_seconds,
    format_share,
    format_times,
    is_number,
    ratio,
)

BOUND_TOLERANCE = 0.97
"""A TPOT below this share of its bound is impossible: one of the two was measured wrongly."""

LITTLE_WAITING = 0.05
"""A smaller share of stall than this is not worth improving."""

SMALL_EXPERT_BYTES = 1 << 20
"""Predicting an expert below this size takes about as long as fetching it from a fast disk (2 GB/s: 0.5 ms)."""


class Advice(NamedTuple):
    """What to do, and the rule that led to it."""

    text: str
    rule: str


def coverage(phase: PhaseStats) -> list[float]:
    """Return the share of all needs that fell on the n most needed experts, for n = 0..all experts; empty without visits.

    This is the best hit rate of a cache of n slots that never changes; a cache that follows the text can do better.
    """
    counts = sorted((count for layer in phase.expert_counts for count in layer), reverse=True)
    total = sum(counts)
    if not total:
        return []
    shares, running = [0.0], 0
    for count in counts:
        running += count
        shares.append(running / total)
    return shares


_NOTHING_COUNTED = "Nothing was fetched, and nothing counted: every expert fits into memory."


def meaning(run: Run) -> list[str]:
    """Return sentences about what happened in a run."""
    stats, phase, name = run.stats, run.phase, run.phase_name
    if not phase.layer_visits:
        return [_NOTHING_COUNTED if stats.cache_rate >= 1 else "No MoE layer has run yet."]
    sentences = []
    if phase.passes:
        sentences.append(
            f"Compute waited {format_share(phase.stall_share)} of {name} time for experts: "
            f"{format_seconds(phase.stall_per_pass_s)} of {format_seconds(phase.pass_s)} per pass."
        )
    sentences.append(
        f"The cache has room for {format_share(min(1.0, stats.cache_rate))} of the experts; "
        f"{format_share(phase.hit_rate)} of the needed ones were there when the gate chose them, "
        f"{format_share(phase.ready_rate)} by the time their layer came to them."
    )
    sentences += _traffic(run) + _where(run) + _prefill(run)
    if is_number(run.bound_ratio):
        sentences.append(
            f"The least that compute and link allow is {format_seconds(run.bound_s)} per token; "
            f"this run took {format_times(run.bound_ratio)} as long."
        )
    return sentences


def advice(run: Run) -> list[Advice]:
    """Return what to try, most useful first; empty if nothing was run."""
    stats, phase = run.stats, run.phase
    if not phase.layer_visits:
        return []
    found = _failures_advice(run)
    if stats.cache_rate >= 1:
        return [*found, Advice("Every expert fits: there is nothing to fetch, and nothing to tune.", "cache rate 100%")]
    if is_number(phase.stall_share) and phase.stall_share < LITTLE_WAITING:
        text = "Waiting is no longer what costs time; a smaller cache may do as well."
        return [*found, Advice(text, "stall below 5% of the time")]
    return found + _bound_advice(run) + _cache_advice(run) + _prefetch_advice(run)


def comparison(runs: Sequence[Run], baseline: Run) -> list[str]:
    """Return sentences about a set of runs, gains and losses alike. `baseline` is one of `runs`."""
    timed = [run for run in runs if is_number(run.time_per_token_s)]
    caching = [run for run in timed if run.stats.cache_rate < 1]
    sentences = []
    if baseline in timed:
        best = min(caching or timed, key=lambda run: run.time_per_token_s)
        others = [run for run in timed if run is not best]
        if best is not baseline or len(others) == 1:
            sentences.append(_versus(best, others[0] if best is baseline else baseline))
        else:
            sentences.append(f"No run is faster than “{best.name}”.")
        resident = [run for run in timed if run not in caching]
        if resident and best in caching:
            speed = resident[0].time_per_token_s / best.time_per_token_s
            sentences.append(
                f"“{best.name}” has {format_share(speed)} of the speed of “{resident[0].name}”, whose experts are all in "
                f"memory, with {format_memory(best.stats.cache_bytes)} of slots."
            )
    return sentences + _steps(caching) + _impossible(runs)


def _impossible(runs: Sequence[Run]) -> list[str]:
    wrong = [run for run in runs if is_number(run.bound_ratio) and run.bound_ratio < BOUND_TOLERANCE]
    if not wrong:
        return []
    names = ", ".join(f"“{run.name}” ({format_times(run.bound_ratio)} its bound)" for run in wrong)
    return [f"Measuring error, faster than possible: {names}. The bandwidth or the compute time was measured wrong."]


def _traffic(run: Run) -> list[str]:
    phase = run.phase
    if not phase.tokens or not phase.bytes_total:
        return []
    text = f"The link moved {format_megabytes(phase.bytes_per_token)} MB per token{_speed(phase)}"
    if not phase.bytes_prefetched:
        return [text + ", all of it on demand."]
    text += f", {format_megabytes(phase.bytes_demand / phase.tokens)} MB of it on demand"
    if is_number(phase.wasted_share):
        text += f"; {format_share(phase.wasted_share)} of the prefetched bytes were never used"
    if run.stats.predictor is not None:
        text += f". Prefetch was on for {format_share(phase.prefetch_on_share)} of the layer visits"
    return [text + "."]


def _where(run: Run) -> list[str]:
    layers, stall_s = run.phase.layers, run.phase.stall_s
    if len(layers) < 4 or not stall_s or run.phase.stall_share < LITTLE_WAITING:
        return []
    worst = sorted(range(len(layers)), key=lambda i: -layers[i].stall_s)[: max(1, len(layers) // 8)]
    share = sum(layers[i].stall_s for i in worst) / stall_s
    top = format_share(layers[worst[0]].stall_s / stall_s)
    if share < 2 * len(worst) / len(layers):
        return [f"The waiting is spread over the layers; the worst, layer {worst[0]}, has {top} of it."]
    if len(worst) == 1:
        return [f"The waiting is concentrated: layer {worst[0]} alone, one of {len(layers)}, has {top} of it."]
    names = ", ".join(str(i) for i in sorted(worst))
    have = f"{len(worst)} of {len(layers)} layers ({names}) have {format_share(share)} of it"
    return [f"The waiting is concentrated: {have}."]


def _prefill(run: Run) -> list[str]:
    prefill = run.stats.prefill
    if run.phase is prefill or not prefill.passes:
        return []
    return [
        f"Prefill took {format_seconds(prefill.pass_s)} per pass of {prefill.tokens / prefill.passes:.0f} tokens, "
        f"{format_share(prefill.stall_share)} of it waiting; it needed "
        f"{format_share(ratio(prefill.needed, _possible(run)))} of all experts and moved "
        f"{format_megabytes(ratio(prefill.bytes_total, prefill.passes))} MB{_speed(prefill)}."
    ]


def _speed(phase: PhaseStats) -> str:
    """Return the traffic over the whole time of the passes, including idle times of the link."""
    bytes_per_s = ratio(phase.bytes_total, phase.duration_s)
    return f" ({format_bandwidth(bytes_per_s)} on average)" if is_number(bytes_per_s) and bytes_per_s else ""


def _possible(run: Run) -> int:
    layers = run.stats.prefill.layers
    return sum(layer.layer_visits * n for layer, n in zip(layers, run.stats.num_experts, strict=True))


def _failures_advice(run: Run) -> list[Advice]:
    failures = run.stats.total.failures_demand + run.stats.total.failures_prefetch
    if not failures:
        return []
    text = f"{failures} transfers failed: read the log for the files and offsets, and check the disk."
    return [Advice(text, "any failed transfer")]


def _bound_advice(run: Run) -> list[Advice]:
    if not is_number(run.bound_ratio) or not BOUND_TOLERANCE <= run.bound_ratio <= 1.15:
        return []
    text = "This is as fast as the link allows; only moving fewer bytes helps: a larger cache, or smaller experts."
    return [Advice(text, "TPOT within 15% of its bound")]


def _cache_advice(run: Run) -> list[Advice]:
    stats, found = run.stats, []
    shares = coverage(run.phase)
    enough = next((n for n, share in enumerate(shares) if share >= 0.9), 0)
    if stats.policy in ("lru", "static"):
        text = 'Evict by expected next use, PromoeConfig(eviction="next_use"): it costs nothing and misses less.'
        found.append(Advice(text, f"policy is {stats.policy}, stall at least 5%"))
    if enough > stats.cache_slots and run.phase.hit_rate < 0.9:
        slot_bytes = ratio(stats.cache_bytes, stats.cache_slots)
        percent = -(-100 * enough // sum(stats.num_experts))  # rounded up, as slots are rounded down
        text = (
            f"Give the cache more memory: 90% of the needs fell on {enough} of {sum(stats.num_experts)} experts, "
            f'which cache="{percent}%" ({format_memory(enough * slot_bytes)}) holds.'
        )
        found.append(Advice(text, "hit rate below 90%, stall at least 5%"))
    return found


def _prefetch_advice(run: Run) -> list[Advice]:
    stats, phase = run.stats, run.phase
    if stats.predictor is None:
        return [Advice('Turn prefetch on: predictor="gate" needs no training.', "no predictor, stall at least 5%")]
    if phase.prefetch_on_share < 0.5:
        return [Advice(_switched_off(stats), "prefetch on for less than 50% of the layer visits")]
    if is_number(phase.wasted_share) and phase.wasted_share > 0.3:
        text = (
            "The predictor is too often wrong: predict fewer layers ahead (lookahead), ask for more certainty "
            "(min_probability), or train a predictor for this model."
        )
        return [Advice(text, "more than 30% of prefetched bytes unused")]
    if phase.ready_rate - phase.hit_rate < 0.02 and phase.hit_rate < 0.9:
        text = "Little arrives in time: predict further ahead (lookahead), or use a faster link or smaller experts."
        return [Advice(text, "ready rate less than 2 points above hit rate, hit rate below 90%")]
    return []


def _switched_off(stats: Stats) -> str:
    slot_bytes = ratio(stats.cache_bytes, stats.cache_slots)
    text = (
        "Leave prefetch as it is: it switched itself off most of the time, because compared with passes without it, it "
        "cost more than it saved (a link busy with demand, or cores busy with computing)."
    )
    if slot_bytes < SMALL_EXPERT_BYTES:
        text += f" Experts of {format_memory(slot_bytes)} arrive nearly as soon as they are named; larger ones gain."
    elif stats.predictor == "gate":
        text += " A predictor trained for this model is right more often, and pays sooner (promoe-train)."
    return text


_UNRESOLVED = ", within what these prompts can tell"
_SINGLE = "one run each: how much of it is chance is not known"


def _versus(run: Run, other: Run) -> str:
    gain = other.time_per_token_s / run.time_per_token_s
    bytes_run, bytes_other = run.stats.decode.bytes_per_token, other.stats.decode.bytes_per_token
    moved = ""
    if is_number(bytes_run) and is_number(bytes_other):
        moved = f", moving {format_megabytes(bytes_run)} instead of {format_megabytes(bytes_other)} MB per token"
    doubt = _UNRESOLVED if _overlap(run, other) else f" ({_SINGLE})" if _single(run, other) else ""
    return (
        f"“{run.name}” is {format_times(gain)} as fast as “{other.name}”: {format_seconds(run.time_per_token_s)} "
        f"instead of {format_seconds(other.time_per_token_s)} per token{moved}{doubt}."
    )


def _steps(runs: Sequence[Run]) -> list[str]:
    """Compare each run with the one before it."""
    if len(runs) < 3:
        return []
    steps = []
    for before, after in pairwise(runs):
        gain = before.time_per_token_s / after.time_per_token_s
        unsure = "~" if _overlap(before, after) else ""
        text = f"“{after.name}” {unsure}{format_times(gain)}"
        if gain < 1:
            text += " (slower)"
        steps.append(text)
    doubt = (
        f" ({_SINGLE})"
        if _single(*runs)
        else " (~: within what these prompts can tell)"
        if "~" in "".join(steps)
        else ""
    )
    return [f"Step by step, each against the row above it: {'; '.join(steps)}{doubt}."]


def _single(*runs: Run) -> bool:
    return any(run.tpot_interval_s is None for run in runs)


def _overlap(a: Run, b: Run) -> bool:
    if a.tpot_interval_s is None or b.tpot_interval_s is None:
        return False
    return a.tpot_interval_s[0] <= b.tpot_interval_s[1] and b.tpot_interval_s[0] <= a.tpot_interval_s[1]
