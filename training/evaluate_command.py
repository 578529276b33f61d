"""What `promoe-train evaluate` does: read, split, replay, judge, print, draw."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

import promoe
from promoe.errors import ConfigError, check_at_least
from promoe.files import write_atomically
from promoe.scheduler.config import EvictionName
from promoe.training.evaluation import evaluate, replay_caches
from promoe.training.evaluation_table import accuracy_columns, cache_columns, legend, table
from promoe.training.kinds import check_kinds, note_on_training, prepare
from promoe.training.measures import Transfer, name_of_rate
from promoe.training.routing_traces import RoutingTrace, load_npz
from promoe.units import format_bandwidth, format_number, format_seconds


@dataclass(frozen=True)
class Evaluation:
    """The options of `promoe-train evaluate`, checked; see there."""

    trace: str
    kinds: Sequence[str]
    lookaheads: Sequence[int]
    policies: Sequence[EvictionName]
    cache_rates: Sequence[float]
    replay_tokens: int
    transfer: Transfer | None
    json: Path | None
    plots: Path | None


def policy_named(name: str) -> EvictionName:
    """The eviction policy of that name, or ConfigError."""
    if name not in get_args(EvictionName):
        raise ConfigError(f"--policy must be of {', '.join(get_args(EvictionName))}. Got {name!r} instead.")
    return name  # type: ignore[return-value]


def transfer_of(bandwidth: str | None, expert_bytes: str | None, layer_seconds: float | None) -> Transfer | None:
    """The link that these three options describe; None if none is given.

    Raises:
        ConfigError: one is missing, or no such number.
    """
    given = {"--bandwidth": bandwidth, "--expert-bytes": expert_bytes, "--layer-seconds": layer_seconds}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if bandwidth is None or expert_bytes is None or layer_seconds is None:
        raise ConfigError(f"FETCHRATE needs all of {', '.join(given)}. {missing[0]} is missing.")
    if not 0 < layer_seconds < float("inf"):
        raise ConfigError(f"--layer-seconds must be more than 0, for example 0.002. Got {layer_seconds} instead.")
    return Transfer(
        _bytes(bandwidth, "--bandwidth", "24GB/s"), _bytes(expert_bytes, "--expert-bytes", "18.9MiB"), layer_seconds
    )


def _bytes(text: str, option: str, example: str) -> float:
    """A number of bytes, `/s` or not, with or without a unit."""
    from promoe.runtime.sizes import UNIT_BYTES

    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text, re.IGNORECASE)
    try:
        value = float(match[1]) * UNIT_BYTES[match[2].upper() or "B"] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"{option} must be a number of bytes more than 0, for example {example}. Got {text!r} instead."
        )
    return value


def run_evaluation(task: Evaluation, out: TextIO) -> dict[str, Any]:
    """Evaluate, print a table to `out`, write the JSON and the plots, and return what the JSON holds.

    Raises:
        TraceError: the trace cannot be used, or lacks the hidden states that a kind needs.
        UnknownKindError: there is no such kind.
        ConfigError: no token would be replayed, a trained predictor does not fit, or matplotlib is not installed.
    """
    check_kinds(task.kinds)
    if task.cache_rates:
        check_at_least(1, replay_tokens=task.replay_tokens)
    if task.plots is not None:
        from promoe.training.plots import check_plots, save_plots

        check_plots(task.plots)
    trace = open_trace(task.trace)
    fit, held_out = trace.split()
    kinds = prepare(task.kinds, trace, fit)
    caches = replay_caches(held_out.first(task.replay_tokens), task.policies, task.cache_rates)
    result = evaluate(kinds, held_out, task.lookaheads, caches, task.transfer)
    print(_conditions(task, trace, fit, held_out), file=out)
    print(*report(result, task), sep="\n", file=out)
    for line in _silent(result):
        print(line, file=out)
    if task.json is not None:
        write_atomically(task.json, [json.dumps(result, indent=2), "\n"])
        print(f"written to {task.json}", file=out)
    if task.plots is not None:
        written = save_plots(result, task.plots, task.trace)
        print(f"drawn to {', '.join(map(str, written))}", file=out)
    return result


def open_trace(path: str) -> RoutingTrace:
    """Ids from a NumPy archive, or a folder that `promoe-train collect` recorded, whose hidden states can be asked for.

    Raises:
        TraceError: it cannot be used.
    """
    if not os.path.isdir(path):
        return load_npz(path)
    from promoe.training.recorded_traces import RecordedTrace

    return RecordedTrace(path).routing


def _silent(result: dict[str, Any]) -> list[str]:
    """Which kinds predict nothing at some distance, and so have dashes there."""
    found = {kind: [k for k, figures in by_k.items() if figures["accuracy"] is None] for kind, by_k in result.items()}
    return [
        f"{kind} predicts nothing at k = {', '.join(lookaheads)}" for kind, lookaheads in found.items() if lookaheads
    ]


def _conditions(task: Evaluation, trace: RoutingTrace, fit: RoutingTrace, held_out: RoutingTrace) -> str:
    replayed = min(task.replay_tokens, held_out.num_tokens) if task.cache_rates else 0
    lines = [
        f"promoe {promoe.__version__}, {task.trace}: {trace.num_layers} MoE layers, {trace.num_experts} experts, "
        f"top {trace.top_k}",
        f"fitted on {len(fit.prompt_lengths):,} prompts ({fit.num_tokens:,} tokens), judged on "
        f"{len(held_out.prompt_lengths):,} ({held_out.num_tokens:,})"
        + (f", misses on the first {replayed:,} of them" if replayed else ""),
    ]
    if task.transfer is not None:
        link = task.transfer
        lines.append(
            f"link of {format_bandwidth(link.bandwidth_bytes_per_s)}, experts of "
            f"{format_number(link.expert_bytes / 1e6)} MB, {format_seconds(link.layer_s)} from layer to layer"
        )
    notes = (note_on_training(name, trace) for name in dict.fromkeys(task.kinds))
    return "\n".join(lines + [note for note in notes if note])


def report(result: dict[str, Any], task: Evaluation) -> list[str]:
    """The lines of a table, and of another one if a link is given."""
    caches = [(policy, name_of_rate(rate)) for policy in task.policies for rate in task.cache_rates]
    columns = accuracy_columns(result) + cache_columns(caches, " misses", "recall", "precision")
    words = ["misses: of what that cache does not hold, recall/precision in %"] if caches else []
    lines = ["", *table(result, columns), "", *legend(columns, *words)]
    if task.transfer is not None and caches:
        columns = cache_columns(caches, "", "goodpred", "fetch_rate")
        words = [
            "GOODPRED/FETCHRATE in %: FETCHRATE is the share of the predicted experts absent from that cache that arrive "
            "within k layers, GOODPRED accuracy times that"
        ]
        lines += ["", *table(result, columns), "", *legend(columns, *words)]
    return lines
