"""Simulates a trace on a machine with a cache of some size under a policy: what is missed, moved and waited for."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from promoe.commands.simulate import belady
from promoe.commands.simulate.forecasts import ORACLE, TraceForecasts
from promoe.commands.simulate.machine import Geometry, Machine
from promoe.commands.simulate.options import PolicyName
from promoe.commands.simulate.simulator import Simulator
from promoe.config import PromoeConfig
from promoe.errors import ConfigError, check_at_least
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.scheduler.reuse import LearnedReuse
from promoe.stats.counts import Phase, PhaseStats
from promoe.training.routing_traces import RoutingTrace
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine, a model on it, and how its cache is run.

    Args:
        machine: the machine.
        geometry: the model's sizes.
        cache_rate: slots of each layer over its experts, rounded down.
        policy: which expert makes room. "default" shares one pool of as many slots between all layers; the others are
            given their slots per layer, as published caches have them.
        predictor: what is forecast, or None.
        lookahead: how many layers ahead are forecast.
        batch: sequences that are generated together; each pass has a token of each.
    """

    machine: Machine
    geometry: Geometry
    cache_rate: float
    policy: PolicyName = "default"
    predictor: str | None = None
    lookahead: int = 1
    batch: int = 1

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
        """Return the slots of a layer; the mean of the layers where they share."""
        return int(self.cache_rate * self.geometry.num_experts + 1e-9)

    @property
    def slots_shared(self) -> bool:
        """Return whether the layers share one pool."""
        return self.policy in ("default", "next_use")

    def config(self) -> SchedulerConfig:
        """Return the scheduler's configuration, for any policy but Belady's."""
        layers, slots = range(self.geometry.num_layers), self.slots_per_layer
        names: dict[str, EvictionName] = {"default": PromoeConfig().eviction, "lfu": "static"}
        return SchedulerConfig(
            num_experts=[self.geometry.num_experts] * len(layers),
            chunk_bytes=[self.geometry.chunks(self.machine)] * len(layers),
            pools=[PoolSpec(slots * len(layers), tuple(layers))]
            if self.slots_shared
            else [PoolSpec(slots, (layer_idx,)) for layer_idx in layers],
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
        trace: which experts each token uses.
        fit: what the predictor, or a static cache's popularity, is fitted on; None: `static` knows the trace itself.
        reuse: what the reuse prior of `default` learned of the model before; None: nothing.

    Returns:
        What `promoe simulate --json` writes: `policy, cache_rate, tokens, misses_per_token, hit_rate, ready_rate,
        bytes_per_token, wasted_bytes_per_token, tpot_s, bound_s` and more (see `docs/simulate.md`). Bytes and misses are per
        decoded token, times per decode pass, which is a token of every sequence.
    """
    run = _on_demand_as_belady(scenario, trace) if scenario.policy == "belady" else _run(scenario, trace, fit, reuse)
    return _report(scenario, trace, run)


class _Run(NamedTuple):
    """What was counted.

    Args:
        decode: over all decode passes.
        prompts_s: seconds of each prompt's pass.
        prompt_visits: visits of layers in these passes.
        demand_bytes: bytes that decoding would have moved without prefetch.
    """

    decode: PhaseStats
    prompts_s: Sequence[float]
    prompt_visits: int
    demand_bytes: int


def _run(scenario: Scenario, trace: RoutingTrace, fit: RoutingTrace | None, reuse: LearnedReuse | None) -> _Run:
    config, geometry, machine = scenario.config(), scenario.geometry, scenario.machine
    simulator = Simulator(config, Wire(machine.bandwidth_bytes_per_s, machine.latency_s), reuse)
    if scenario.policy == "static":
        simulator.fix_popularity(_popularity(fit or trace, geometry.num_experts))
    replay, forecasts = None, None
    if scenario.predictor:
        replay = Replay(config, taught=simulator.scheduler)
        # With the model's number of experts: those with the highest ids may not have been used.
        widened = dataclasses.replace(trace, num_experts=geometry.num_experts)
        forecasts = TraceForecasts(scenario.predictor, fit, widened, scenario.lookahead, scenario.batch)
    replayed_bytes = {"prefill": 0, "decode": 0}
    prompts_s = []

    def work(layer_idx: int, num_tokens: int, num_used: int) -> tuple[float, float]:
        rows = num_tokens * geometry.top_k / num_used
        return geometry.layer_s(machine, num_tokens), geometry.expert_s(machine, rows)

    def replay_visit(phase: Phase, layer_idx: int, tokens: Sequence[Sequence[int]]) -> None:
        if replay is not None:
            replayed_bytes[phase] += replay.visit(layer_idx, tokens, scenario.batch)

    passes = list(passes_of(trace, scenario.batch))
    name = f"simulate {scenario.policy} {scenario.cache_rate:.1%}"
    for phase, rows in tqdm(passes, name, unit="pass", disable=None, leave=False):
        seconds = simulator.run_pass(
            phase,
            list(enumerate(trace.experts[rows].transpose(1, 0, 2).tolist())),
            work,
            forecasts=partial(forecasts.of, rows) if forecasts is not None and phase == "decode" else None,
            stream=config.prefetch or scenario.policy == "default",
            num_sequences=scenario.batch,
            after_visit=partial(replay_visit, phase),
        )
        if phase == "prefill":
            prompts_s.append(seconds)
    decode = simulator.recorder.phase_stats("decode")
    prompt_visits = simulator.recorder.phase_stats("prefill").layer_visits
    demand_bytes = decode.bytes_total if replay is None else replayed_bytes["decode"]
    return _Run(decode, prompts_s, prompt_visits, demand_bytes)


def _on_demand_as_belady(scenario: Scenario, trace: RoutingTrace) -> _Run:
    """Count what Belady's choice misses. What is there runs first, the missing as they come, one after the other."""
    geometry, machine = scenario.geometry, scenario.machine
    missed = belady.misses(trace.experts, geometry.num_experts, scenario.slots_per_layer)
    fetch_s, expert_s = machine.link_s(geometry.expert_bytes), geometry.expert_s(machine)
    stall_s = 0.0
    for count, visits in zip(*np.unique(missed, return_counts=True), strict=True):
        now_s = resident_s = (trace.top_k - int(count)) * expert_s
        for idx in range(int(count)):
            now_s = max(now_s, machine.latency_s + (idx + 1) * fetch_s) + expert_s
        stall_s += int(visits) * (now_s - resident_s - int(count) * expert_s)
    needed, total = trace.experts.size, int(missed.sum())
    decode = PhaseStats(
        tokens=trace.num_tokens,
        passes=trace.num_tokens,
        layer_visits=missed.size,
        needed=needed,
        hits=needed - total,
        ready=needed - total,
        bytes_demand=total * geometry.expert_bytes,
        stall_s=stall_s,
        duration_s=trace.num_tokens * geometry.token_s(machine) + stall_s,
    )
    return _Run(decode, (), 0, decode.bytes_demand)


def _report(scenario: Scenario, trace: RoutingTrace, run: _Run) -> dict[str, Any]:
    machine, geometry, decode = scenario.machine, scenario.geometry, run.decode
    # The clock only computes or waits.
    compute_s = ratio(decode.duration_s - decode.stall_s, decode.passes)
    transfer_s = ratio(machine.link_s(run.demand_bytes), decode.passes)
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
        "tokens": decode.tokens,
        "batch": scenario.batch,
        "sequences_per_pass": ratio(decode.tokens, decode.passes),
        "layer_visits": decode.layer_visits + run.prompt_visits,
        "misses_per_token": ratio(decode.needed - decode.hits, decode.tokens),
        "hit_rate": decode.hit_rate,
        "ready_rate": decode.ready_rate,
        "bytes_per_token": decode.bytes_per_token,
        "prefetched_bytes_per_token": ratio(decode.bytes_prefetched, decode.tokens),
        "wasted_bytes_per_token": ratio(decode.bytes_wasted, decode.tokens),
        "evictions_per_token": ratio(decode.evictions, decode.tokens),
        "tpot_s": decode.pass_s,
        "stall_s": decode.stall_per_pass_s,
        "compute_s": compute_s,
        "transfer_s": transfer_s,
        "bound_s": max(compute_s, transfer_s),
        "link_use": ratio(machine.link_s(decode.bytes_total), decode.duration_s),
        "ttft_s": median(run.prompts_s) if run.prompts_s else None,
    }
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in figures.items()}


def _popularity(trace: RoutingTrace, num_experts: int) -> npt.NDArray[np.float64]:
    counts = [np.bincount(trace.experts[:, idx].ravel(), minlength=num_experts) for idx in range(trace.num_layers)]
    return np.stack(counts).astype(np.float64)


def needs_fit(predictor: str | None) -> bool:
    """Return whether a predictor has to be fitted on tokens other than those it is judged on."""
    return predictor is not None and predictor != ORACLE


class TracePass(NamedTuple):
    """Rows of a trace that go through the model together."""

    phase: Phase
    rows: list[int]


def passes_of(trace: RoutingTrace, batch: int) -> Iterator[TracePass]:
    """Yield all passes of a trace, as with continuous batching: a sequence that ends makes room for the next one.

    A prompt is a pass of its own, before its sequence takes its place. Tokens that the trace does not know to be a prompt's are
    generated. Towards the end there may be fewer than `batch` sequences left.

    Args:
        trace: its prompts come in their order.
        batch: sequences that are generated at a time.
    """
    waiting = deque(zip(trace.prompt_starts.tolist(), trace.prompt_lengths.tolist(), strict=True))
    places: list[deque[int]] = []
    while waiting or places:
        while waiting and len(places) < batch:
            start, length = waiting.popleft()
            prompt = 0 if trace.generated is None else int(np.count_nonzero(~trace.generated[start : start + length]))
            if prompt:
                yield TracePass("prefill", list(range(start, start + prompt)))
            if prompt < length:
                places.append(deque(range(start + prompt, start + length)))
        if places:
            yield TracePass("decode", [place.popleft() for place in places])
            places = [place for place in places if place]
