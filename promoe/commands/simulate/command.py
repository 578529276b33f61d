"""`promoe simulate`: reads a trace, simulates, prints a few lines and writes JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from promoe.commands.simulate.machine import Geometry, geometry_of, machine_of
from promoe.commands.simulate.run import PolicyName, Scenario, needs_fit, simulate
from promoe.errors import ConfigError, check_at_least
from promoe.files import write_atomically
from promoe.training.evaluate import open_trace
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned, format_megabytes, format_number, format_seconds, format_share, format_times, ratio

# Policies that other prompts teach something.
FITTED = ("default", "next_use", "static")
# Prompts that predictors are fitted on where no other trace is given.
FIT_SHARE = 0.7


@dataclass(frozen=True)
class Task:
    """The command's options, read and checked; see `promoe.cli.simulate`."""

    trace: str
    cache: str
    policy: PolicyName
    max_tokens: int | None
    predictor: str | None
    lookahead: int
    batch: int
    hardware: str
    model: str | Geometry
    bits: float | None
    fit: str | None
    json: Path | None


def run_simulation(task: Task, out: TextIO) -> dict[str, Any]:
    """Simulate, print to `out`, write the JSON, and return what it holds.

    Raises:
        TraceError: a trace cannot be read.
        ConfigError: an option does not fit the others, or the trace.
    """
    check_at_least(1, max_tokens=task.max_tokens)
    machine, trace = machine_of(task.hardware), open_trace(task.trace)
    geometry = geometry_of(task.model, trace.num_layers, trace.num_experts, trace.top_k)
    if task.bits is not None:
        if not 0 < task.bits <= 64:
            raise ConfigError(f"--bits must be more than 0 and at most 64 per weight. Got {task.bits:g}.")
        geometry = replace(geometry, bits_per_weight=task.bits)
        if geometry.expert_bytes < 1:
            raise ConfigError(f"With --bits {task.bits:g} an expert would take no bytes. Give more.")
    scenario = Scenario(machine, geometry, _rate(task.cache), task.policy, task.predictor, task.lookahead, task.batch)
    fit, reuse, note = None, None, None
    if task.fit is not None and task.policy not in FITTED and not needs_fit(task.predictor):
        raise ConfigError(
            f"--policy {task.policy} without a predictor is fitted on nothing. Leave out --fit, or simulate one of "
            f"{', '.join(FITTED)}."
        )
    if task.fit is not None:
        fit = replace(_same_model(open_trace(task.fit), trace, geometry, task.fit), num_experts=geometry.num_experts)
        reuse = fit_reuse(fit) if task.policy in ("default", "next_use") else None
    elif needs_fit(task.predictor):
        fit, trace = trace.split(FIT_SHARE)
        fit = replace(fit, num_experts=geometry.num_experts)
        note = f"{task.predictor} was fitted on the first {FIT_SHARE:.0%} of the prompts; the rest are simulated"
    elif task.policy == "static":
        note = (
            "static keeps what these very tokens use most: no popularity can be better (--fit FILE for an honest one)"
        )
    if task.max_tokens is not None:
        trace = trace.first(task.max_tokens)
    result = simulate(scenario, trace, fit, reuse)
    print(*_lines(result, note), sep="\n", file=out)
    if task.json is not None:
        write_atomically(task.json, [json.dumps(result, indent=2), "\n"])
        print(f"written to {task.json}", file=out)
    return result


def _rate(cache: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", cache)
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigError(f"--cache must be a share of the routed experts, such as 25%. Got {cache!r} instead.")
    return float(match[1]) / 100


def _same_model(fit: RoutingTrace, trace: RoutingTrace, geometry: Geometry, path: str) -> RoutingTrace:
    if (fit.num_layers, fit.top_k) != (trace.num_layers, trace.top_k) or fit.num_experts > geometry.num_experts:
        raise ConfigError(
            f"--fit {path} is of another model: {fit.num_layers} MoE layers, top {fit.top_k}, but the trace has "
            f"{trace.num_layers}, top {trace.top_k}, and experts up to {fit.num_experts} where it has {geometry.num_experts}. "
            "Give a trace of the same model."
        )
    return fit


def _lines(result: dict[str, Any], note: str | None) -> list[str]:
    shared = "shared by all layers" if result["slots_shared_by_layers"] else "each layer its own"
    predictor = f", predictor {result['predictor']}" if result["predictor"] else ""
    rows = [
        ("hits", format_share(result["hit_rate"]), f"{format_number(result['misses_per_token'])} misses per token"),
        ("ready in time", format_share(result["ready_rate"]), ""),
        (
            "moved per token",
            f"{format_megabytes(result['bytes_per_token'])} MB",
            f"{format_megabytes(result['prefetched_bytes_per_token'])} MB prefetched, "
            f"{format_megabytes(result['wasted_bytes_per_token'])} MB in vain",
        ),
        ("TPOT", format_seconds(result["tpot_s"]), f"{format_seconds(result['stall_s'])} of it waiting for experts"),
        (
            "bound",
            format_seconds(result["bound_s"]),
            f"the larger of computing ({format_seconds(result['compute_s'])}) and moving what is missed "
            f"({format_seconds(result['transfer_s'])}); TPOT is {format_times(ratio(result['tpot_s'], result['bound_s']))} that"
            if result["tpot_s"] is not None
            else "",
        ),
        ("link in use", format_share(result["link_use"]), ""),
    ]
    if result["ttft_s"] is not None:
        rows.append(("TTFT", format_seconds(result["ttft_s"]), "median of the prompts"))
    values = aligned([(name, value) for name, value, _ in rows])
    generated = "generated " if result["ttft_s"] is not None else ""  # else it is not known which ones were
    together = f", {result['sequences_per_pass']:.3g} sequences at a time" if result["batch"] > 1 else ""
    return [
        f"{result['model']} on {result['hardware']}; {result['tokens']:,} {generated}tokens of {result['prompts']:,} "
        f"prompts{together}",
        f"policy {result['policy']}{predictor}, cache {format_share(result['cache_rate'])}: {result['slots']:,} slots of "
        f"{format_megabytes(result['expert_bytes'])} MB, {shared}",
        *([note] if note else []),
        "",
        *(f"{line}   {remark}".rstrip() for line, (_, _, remark) in zip(values, rows, strict=True)),
    ]
