"""Simulates a trace on a machine with a cache of some size under a policy: what is missed, moved and waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from tqdm.auto import tqdm

from promoe.commands.simulate import belady
from promoe.commands.simulate.batches import Pass, passes
from promoe.commands.simulate.forecasts import ORACLE, TraceForecasts
from promoe.commands.simulate.machine import Geometry, Machine
from promoe.commands.simulate.simulator import Simulator
from promoe.config import MAX_PREDICTED_TOKENS, STREAMED_SHARE, PromoeConfig
from promoe.errors import ConfigError, check_at_least
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.scheduler.reuse import LearnedReuse
from promoe.training.routing_traces import RoutingTrace
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio

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
        batch: sequences that are generated together, each pass a token of each.
        quotas: slots of each layer, for any policy but Belady's; None: as the policy has them.
    """

    machine: Machine
    geometry: Geometry
    cache_rate: float
    policy: PolicyName = "default"
    predictor: str | None = None
    lookahead: int = 1
    batch: int = 1
    quotas: tuple[int, ...] | None = None

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
        check_at_least(1, batch=self.batch, lookahead=self.lookahead)
        if self.policy == "belady" and self.batch > 1:
            raise ConfigError("Belady's choice is simulated for one sequence at a time. Leave --batch out.")

    @property
    def slots_per_layer(self) -> int:
        """On average, where layers share."""
        return int(self.cache_rate * self.geometry.num_experts + 1e-9)

    @property
    def slots_shared(self) -> bool:
        """Whether the layers have one pool."""
        return self.policy in ("default", "next_use") and self.quotas is None

    def config(self) -> SchedulerConfig:
        """Of the scheduler (for any policy but Belady's)."""
        layers, slots = range(self.geometry.num_layers), self.slots_per_layer
        quotas = self.quotas or (slots,) * len(layers)
        names: dict[str, EvictionName] = {"default": PromoeConfig().eviction, "lfu": "static"}
        return SchedulerConfig(
            num_experts=[self.geometry.num_experts] * len(layers),
            chunk_bytes=[self.geometry.chunks(self.machine)] * len(layers),
            pools=[PoolSpec(slots * len(layers), tuple(layers))]
            if self.slots_shared
            else [PoolSpec(quota, (layer_idx,)) for layer_idx, quota in zip(layers, quotas, strict=True)],
            eviction=names.get(self.policy, self.policy),  # type: ignore[arg-type]
            prefetch=self.predictor is not None,
        )


def simulate(
    scenario: Scenario, trace: RoutingTrace, fit: RoutingTrace | None = None, reuse: LearnedReuse | None = None
) -> dict[str, Any]:
    """Run a trace through a machine, beginning with an empty cache.

    Tokens of a prompt are one pass where the trace knows which they are; else every token is generated.

    Args:
        scenario: machine, model, cache and policy.
        trace: what is routed where.
        fit: what the predictor, or a static cache's popularity, is fitted on; None: `static` knows the trace itself.
        reuse: what the reuse prior of `default` has learned of the model before; None: nothing.

    Returns:
        What `promoe simulate` writes: `policy, cache_rate, tokens, misses_per_token, hit_rate, ready_rate, bytes_per_token,
        wasted_bytes_per_token, tpot_s, bound_s` and more (see `docs/simulate.md`). Bytes and misses are per decoded
        token, times per decode pass, which is a token of every sequence.
    """
    if scenario.policy == "belady":
        return _report(scenario, trace, _belady(scenario, trace))
    return _report(scenario, trace, _simulated(scenario, trace, fit, reuse))


@dataclass
class _Figures:
    """Sums over decode passes; `prefill_s` per prompt."""

    tokens: int = 0
    passes: int = 0
    needed: int = 0
    hits: int = 0
    ready: int = 0
    moved_bytes: int = 0
    prefetched_bytes: int = 0
    wasted_bytes: int = 0
    evictions: int = 0
    duration_s: float = 0.0
    stall_s: float = 0.0
    compute_s: float = 0.0
    """Of everything resident."""
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
    demand_bytes, compute_s, prefill_s = 0, 0.0, []
    for phase, rows in _passes(scenario, trace):
        num_tokens = len(rows)
        simulator.recorder.begin_pass(phase, num_tokens, num_tokens if phase == "decode" else 1)
        start_s = simulator.now_s
        layer_s = geometry.layer_s(machine, num_tokens)
        for layer_idx, tokens in enumerate(trace.experts[rows].transpose(1, 0, 2).tolist()):
            num_used = len({idx for token in tokens for idx in token})
            expert_s = geometry.expert_s(machine, num_tokens * geometry.top_k / num_used)
            stream = num_tokens > MAX_PREDICTED_TOKENS and num_used >= STREAMED_SHARE * geometry.num_experts
            ask = None if forecasts is None or phase == "prefill" else partial(forecasts.of, rows)
            stream = stream and (config.prefetch or scenario.policy == "default")
            simulator.visit(layer_idx, tokens, layer_s, expert_s, ask, stream, scenario.batch)
            if phase == "decode":
                compute_s += layer_s + num_used * expert_s
            if replay is not None:
                missed = replay.visit(layer_idx, tokens, scenario.batch)
                demand_bytes += missed if phase == "decode" else 0
        simulator.recorder.end_pass(simulator.now_s - start_s)
        if phase == "prefill":
            prefill_s.append(simulator.now_s - start_s)
    stats = simulator.recorder.phase_stats("decode")
    moved = stats.bytes_demand + stats.bytes_prefetched
    return _Figures(
        tokens=stats.tokens,
        passes=stats.passes,
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
        compute_s=compute_s,
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
        passes=trace.num_tokens,
        needed=needed,
        hits=needed - total,
        ready=needed - total,
        moved_bytes=total * geometry.expert_bytes,
        duration_s=trace.num_tokens * geometry.token_s(machine) + stall_s,
        stall_s=stall_s,
        compute_s=trace.num_tokens * geometry.token_s(machine),
        demand_bytes=total * geometry.expert_bytes,
        layer_visits=missed.size,
    )


def _report(scenario: Scenario, trace: RoutingTrace, found: _Figures) -> dict[str, Any]:
    machine, geometry, tokens = scenario.machine, scenario.geometry, found.tokens
    compute_s = ratio(found.compute_s, found.passes)
    transfer_s = ratio(machine.link_s(found.demand_bytes), found.passes)
    figures: dict[str, Any] = {
        "policy": scenario.policy,
        "cache_rate": scenario.cache_rate,
        "slots": scenario.slots_per_layer * geometry.num_layers,
        "slots_shared_by_layers": scenario.slots_shared,
        "predictor": scenario.predictor,
        "hardware": machine.name,
        "model": geometry.name,
        "expert_bytes": geometry.expert_bytes,
        "prompts": len(trace.prompt_lengths),
        "tokens": tokens,
        "batch": scenario.batch,
        "sequences_per_pass": ratio(tokens, found.passes),
        "layer_visits": found.layer_visits,
        "misses_per_token": ratio(found.needed - found.hits, tokens),
        "hit_rate": ratio(found.hits, found.needed),
        "ready_rate": ratio(found.ready, found.needed),
        "bytes_per_token": ratio(found.moved_bytes, tokens),
        "prefetched_bytes_per_token": ratio(found.prefetched_bytes, tokens),
        "wasted_bytes_per_token": ratio(found.wasted_bytes, tokens),
        "evictions_per_token": ratio(found.evictions, tokens),
        "tpot_s": ratio(found.duration_s, found.passes),
        "stall_s": ratio(found.stall_s, found.passes),
        "compute_s": compute_s,
        "transfer_s": transfer_s,
        "bound_s": max(compute_s, transfer_s),
        "link_use": ratio(machine.link_s(found.moved_bytes), found.duration_s),
        "ttft_s": float(np.median(found.prefill_s)) if found.prefill_s else None,
    }
    return {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in figures.items()}


def _passes(scenario: Scenario, trace: RoutingTrace) -> Iterator[Pass]:
    name = f"simulate {scenario.policy} {scenario.cache_rate:.1%}"
    return iter(tqdm(list(passes(trace, scenario.batch)), name, unit="pass", disable=None, leave=False))


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
