"""Simulates a trace on a machine with a cache of some size under a policy: what is missed, moved and waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from tqdm.auto import tqdm

from promoe.config import MAX_PREDICTED_TOKENS, STREAMED_SHARE, PromoeConfig
from promoe.errors import ConfigError
from promoe.replay import Replay
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.reuse import LearnedReuse
from promoe.simulation import belady
from promoe.simulation.forecasts import ORACLE, TraceForecasts
from promoe.simulation.machine import Geometry, Machine
from promoe.simulation.simulator import Simulator
from promoe.training.routing_traces import RoutingTrace
from promoe.units import ratio
from promoe.wire import Wire

PolicyName = Literal["default", "next_use", "lru", "lfu", "lfru", "static", "belady"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate.

    Args:
        machine: what it runs on.
        geometry: the model's sizes.
        cache_rate: slots of each layer over its experts, rounded down.
        policy: which expert makes room. "default" shares one pool of as many slots between all layers; the others are
            given their slots per layer, as published caches have them.
        predictor: what is forecast, or None.
        lookahead: layers ahead.
    """

    machine: Machine
    geometry: Geometry
    cache_rate: float
    policy: PolicyName = "default"
    predictor: str | None = None
    lookahead: int = 1

    def __post_init__(self) -> None:
        if self.policy not in get_args(PolicyName):
            raise ConfigError(f"There is no policy {self.policy!r}. Choose from {', '.join(get_args(PolicyName))}.")
        if self.slots_per_layer < 1:
            least = -(-100 // self.geometry.num_experts)
            raise ConfigError(
                f"A cache of {self.cache_rate:.3g} of {self.geometry.num_experts} experts per layer is less than one slot. "
                f"Give at least {least}%."
            )
        if self.policy == "belady" and self.predictor is not None:
            raise ConfigError("Belady's choice knows the future: it has no use for a predictor. Leave --predictor out.")
        if self.lookahead < 1:
            raise ConfigError(f"--lookahead must be at least 1 layer. Got {self.lookahead}.")

    @property
    def slots_per_layer(self) -> int:
        """On average, where layers share."""
        return int(self.cache_rate * self.geometry.num_experts + 1e-9)

    def config(self) -> SchedulerConfig:
        """Of the scheduler (for any policy but Belady's)."""
        layers, slots = range(self.geometry.num_layers), self.slots_per_layer
        shared = self.policy in ("default", "next_use")
        names: dict[str, EvictionName] = {"default": PromoeConfig().eviction, "lfu": "static"}
        return SchedulerConfig(
            num_experts=[self.geometry.num_experts] * len(layers),
            chunk_bytes=[self.geometry.chunks(self.machine)] * len(layers),
            pools=[PoolSpec(slots * len(layers), tuple(layers))] if shared else [PoolSpec(slots, (n,)) for n in layers],
            eviction=names.get(self.policy, self.policy),  # type: ignore[arg-type]
            prefetch=self.predictor is not None,
        )


def simulate(
    scenario: Scenario, trace: RoutingTrace, fit: RoutingTrace | None = None, reuse: LearnedReuse | None = None
) -> dict[str, Any]:
    """Run a trace through a machine, beginning with an empty cache.

    Tokens of a prompt are one pass where the trace knows which they are; else every token is a pass of its own.

    Args:
        scenario: machine, model, cache and policy.
        trace: what is routed where.
        fit: what the predictor, or a static cache's popularity, is fitted on; None: `static` knows the trace itself.
        reuse: what the reuse prior of `default` has learned of the model before; None: nothing.

    Returns:
        What `promoe simulate` writes: `policy, cache_rate, tokens, misses_per_token, hit_rate, ready_rate, bytes_per_token,
        wasted_bytes_per_token, tpot_s, bound_s` and more (see `docs/simulate.md`). Per token means per decoded one.
    """
    if scenario.policy == "belady":
        return _report(scenario, trace, _belady(scenario, trace))
    return _report(scenario, trace, _simulated(scenario, trace, fit, reuse))


@dataclass
class _Figures:
    """Sums over decode passes; `prefill_s` per prompt."""

    tokens: int = 0
    needed: int = 0
    hits: int = 0
    ready: int = 0
    moved_bytes: int = 0
    prefetched_bytes: int = 0
    wasted_bytes: int = 0
    evictions: int = 0
    duration_s: float = 0.0
    stall_s: float = 0.0
    demand_bytes: float = 0.0
    """That a replay without prefetch misses."""
    prefill_s: tuple[float, ...] = ()
    layer_visits: int = 0


def _simulated(
    scenario: Scenario, trace: RoutingTrace, fit: RoutingTrace | None, reuse: LearnedReuse | None
) -> _Figures:
    config, geometry, machine = scenario.config(), scenario.geometry, scenario.machine
    simulator = Simulator(config, Wire(machine.bandwidth_bytes_per_s, machine.latency_s), reuse)
    if scenario.policy == "static":
        simulator.fix_popularity(_popularity(fit or trace, geometry.num_experts))
    replay = Replay(config, taught=simulator.scheduler) if scenario.predictor else None
    forecasts = None
    if scenario.predictor:
        forecasts = TraceForecasts(scenario.predictor, fit, _widened(trace, geometry.num_experts), scenario.lookahead)
    demand_bytes, prefill_s = 0, []
    for first, last in _passes(trace, f"{scenario.policy} {scenario.cache_rate:.1%}"):
        num_tokens = last - first
        phase: Literal["prefill", "decode"] = "decode" if num_tokens == 1 else "prefill"
        simulator.recorder.begin_pass(phase, num_tokens, 1)
        start_s = simulator.now_s
        layer_s = geometry.layer_s(machine, num_tokens)
        expert_s = geometry.expert_s(machine)
        for layer_idx, tokens in enumerate(trace.experts[first:last].transpose(1, 0, 2).tolist()):
            stream = False
            if num_tokens > 1:
                num_used = len(np.unique(trace.experts[first:last, layer_idx]))
                expert_s = geometry.expert_s(machine, num_tokens * geometry.top_k / num_used)
                stream = num_tokens > MAX_PREDICTED_TOKENS and num_used >= STREAMED_SHARE * geometry.num_experts
            ask = None
            if forecasts is not None and num_tokens == 1:
                ask = partial(forecasts.of, first)
            simulator.visit(
                layer_idx, tokens, layer_s, expert_s, ask, stream and (config.prefetch or scenario.policy == "default")
            )
            if replay is not None:
                missed = replay.visit(layer_idx, tokens)
                demand_bytes += missed if phase == "decode" else 0
        simulator.recorder.end_pass(simulator.now_s - start_s)
        if phase == "prefill":
            prefill_s.append(simulator.now_s - start_s)
    stats = simulator.recorder.phase_stats("decode")
    moved = stats.bytes_demand + stats.bytes_prefetched
    return _Figures(
        tokens=stats.tokens,
        needed=stats.needed,
        hits=stats.hits,
        ready=stats.ready,
        moved_bytes=moved,
        prefetched_bytes=stats.bytes_prefetched,
        wasted_bytes=stats.bytes_wasted,
        evictions=stats.evictions,
        duration_s=stats.duration_s,
        stall_s=stats.stall_s,
        demand_bytes=moved if replay is None else demand_bytes,
        prefill_s=tuple(prefill_s),
        layer_visits=stats.layer_visits + simulator.recorder.phase_stats("prefill").layer_visits,
    )


def _belady(scenario: Scenario, trace: RoutingTrace) -> _Figures:
    """On demand: what is there runs first, the missing as they come, one after the other."""
    geometry, machine = scenario.geometry, scenario.machine
    missed = belady.misses(trace.experts, geometry.num_experts, scenario.slots_per_layer)
    fetch_s, expert_s = machine.link_s(geometry.expert_bytes), geometry.expert_s(machine)
    stall_s = 0.0
    for count, visits in zip(*np.unique(missed, return_counts=True), strict=True):
        now_s = resident_s = (trace.top_k - int(count)) * expert_s
        for idx in range(int(count)):
            now_s = max(now_s, machine.latency_s + (idx + 1) * fetch_s) + expert_s
        stall_s += int(visits) * (now_s - resident_s - int(count) * expert_s)
    total = int(missed.sum())
    needed = trace.experts.size
    return _Figures(
        tokens=trace.num_tokens,
        needed=needed,
        hits=needed - total,
        ready=needed - total,
        moved_bytes=total * geometry.expert_bytes,
        duration_s=trace.num_tokens * geometry.token_s(machine) + stall_s,
        stall_s=stall_s,
        demand_bytes=total * geometry.expert_bytes,
        layer_visits=missed.size,
    )


def _report(scenario: Scenario, trace: RoutingTrace, found: _Figures) -> dict[str, Any]:
    machine, geometry, tokens = scenario.machine, scenario.geometry, found.tokens
    compute_s = geometry.token_s(machine)
    transfer_s = ratio(machine.link_s(found.demand_bytes), tokens)
    figures: dict[str, Any] = {
        "policy": scenario.policy,
        "cache_rate": scenario.cache_rate,
        "slots": scenario.slots_per_layer * geometry.num_layers,
        "slots_shared_by_layers": scenario.policy in ("default", "next_use"),
        "predictor": scenario.predictor,
        "hardware": machine.name,
        "model": geometry.name,
        "expert_bytes": geometry.expert_bytes,
        "prompts": len(trace.prompt_lengths),
        "tokens": tokens,
        "layer_visits": found.layer_visits,
        "misses_per_token": ratio(found.needed - found.hits, tokens),
        "hit_rate": ratio(found.hits, found.needed),
        "ready_rate": ratio(found.ready, found.needed),
        "bytes_per_token": ratio(found.moved_bytes, tokens),
        "prefetched_bytes_per_token": ratio(found.prefetched_bytes, tokens),
        "wasted_bytes_per_token": ratio(found.wasted_bytes, tokens),
        "evictions_per_token": ratio(found.evictions, tokens),
        "tpot_s": ratio(found.duration_s, tokens),
        "stall_s": ratio(found.stall_s, tokens),
        "compute_s": compute_s,
        "transfer_s": transfer_s,
        "bound_s": max(compute_s, transfer_s),
        "link_use": ratio(machine.link_s(found.moved_bytes), found.duration_s),
        "ttft_s": float(np.median(found.prefill_s)) if found.prefill_s else None,
    }
    return {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in figures.items()}


def _spans(trace: RoutingTrace) -> Iterator[tuple[int, int]]:
    """Rows of each pass: a prompt's tokens together where they are known, every other token alone."""
    if trace.generated is None:
        yield from ((row, row + 1) for row in range(trace.num_tokens))
        return
    for start, length in zip(trace.prompt_starts.tolist(), trace.prompt_lengths.tolist(), strict=True):
        prompt = int(np.count_nonzero(~trace.generated[start : start + length]))
        if prompt:
            yield start, start + prompt
        yield from ((row, row + 1) for row in range(start + prompt, start + length))


def _passes(trace: RoutingTrace, name: str) -> Iterator[tuple[int, int]]:
    return iter(tqdm(list(_spans(trace)), f"simulate {name}", unit="pass", disable=None, leave=False))


def _popularity(trace: RoutingTrace, num_experts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    layers = range(trace.num_layers)
    return np.stack([np.bincount(trace.experts[:, n].ravel(), minlength=num_experts) for n in layers]).astype(
        np.float64
    )


def _widened(trace: RoutingTrace, num_experts: int) -> RoutingTrace:
    """With the model's number of experts: those with the highest ids may not have been used."""
    return dataclasses.replace(trace, num_experts=num_experts)


def needs_fit(predictor: str | None) -> bool:
    """Whether a predictor has to be fitted on tokens other than those it is judged on."""
    return predictor is not None and predictor != ORACLE
