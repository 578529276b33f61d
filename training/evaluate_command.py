"""What `promoe-train evaluate` does: read, split, replay, judge, print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

import promoe
from promoe.errors import ConfigError
from promoe.output import write_atomically
from promoe.scheduler.config import EvictionName
from promoe.training.evaluation import check_kinds, evaluate, name_of_rate, replay_caches
from promoe.training.routing_traces import RoutingTrace, load_npz
from promoe.units import aligned


@dataclass(frozen=True)
class Evaluation:
    """The options of `promoe-train evaluate`, checked; see there."""

    trace: str
    kinds: Sequence[str]
    lookaheads: Sequence[int]
    policies: Sequence[EvictionName]
    cache_rates: Sequence[float]
    replay_tokens: int
    json: Path | None


def policy_named(name: str) -> EvictionName:
    """The eviction policy of that name, or ConfigError."""
    if name not in get_args(EvictionName):
        raise ConfigError(f"--policy must be of {', '.join(get_args(EvictionName))}. Got {name!r} instead.")
    return name  # type: ignore[return-value]


def run_evaluation(task: Evaluation, out: TextIO) -> dict[str, Any]:
    """Evaluate, print a table to `out`, write the JSON, and return what it holds.

    Raises:
        TraceError: the trace cannot be used.
        UnknownKindError: a kind that needs more than ids, or none at all.
        ConfigError: no token would be replayed.
    """
    check_kinds(task.kinds)
    if task.cache_rates and task.replay_tokens < 1:
        raise ConfigError(f"--replay-tokens must be at least 1. Got {task.replay_tokens}.")
    trace = load_npz(task.trace)
    fit, held_out = trace.split()
    caches = replay_caches(held_out.first(task.replay_tokens), task.policies, task.cache_rates)
    result = evaluate(fit, held_out, task.kinds, task.lookaheads, caches)
    print(_conditions(task, trace, fit, held_out), file=out)
    print(table(result, task), file=out)
    if task.json is not None:
        write_atomically(task.json, [json.dumps(result, indent=2), "\n"])
        print(f"written to {task.json}", file=out)
    return result


def _conditions(task: Evaluation, trace: RoutingTrace, fit: RoutingTrace, held_out: RoutingTrace) -> str:
    replayed = min(task.replay_tokens, held_out.num_tokens) if task.cache_rates else 0
    return (
        f"promoe {promoe.__version__}, {task.trace}: {trace.num_layers} MoE layers, {trace.num_experts} experts, "
        f"top {trace.top_k}\n"
        f"fitted on {len(fit.prompt_lengths):,} prompts ({fit.num_tokens:,} tokens), judged on "
        f"{len(held_out.prompt_lengths):,} ({held_out.num_tokens:,}), misses on the first {replayed:,} of them"
    )


def table(result: dict[str, Any], task: Evaluation) -> str:
    """One row per kind and lookahead: accuracy, and per cache recall / precision of misses, in percent."""
    columns = [(policy, name_of_rate(rate)) for policy in task.policies for rate in task.cache_rates]
    rows = [["kind", "k", "accuracy", *(f"{policy} {rate}" for policy, rate in columns)]]
    for kind, by_lookahead in result.items():
        for lookahead, figures in by_lookahead.items():
            misses = [figures["misses"][policy][rate] for policy, rate in columns]
            cells = [f"{_percent(cell['recall'])} / {_percent(cell['precision'])}" for cell in misses]
            rows.append([kind, lookahead, _percent(figures["accuracy"]), *cells])
    head = ["misses: recall / precision, %"] if columns else []
    return "\n".join(head + aligned(rows))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
