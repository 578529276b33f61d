"""What `promoe-train evaluate` does: read a trace, split it, replay caches, judge kinds of predictors, print, draw."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

import promoe
from promoe.files import check_writable, write_atomically
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.training.baselines import Kind, spread, used
from promoe.training.kinds import check_kinds, note_on_training, prepare
from promoe.training.metrics import Caches, Figures, Transfer, name_of_rate, top, transfer_of
from promoe.training.options import Evaluate, check_choice
from promoe.training.result_table import accuracy_columns, cache_columns, legend, recall_columns, table
from promoe.training.routing_traces import RoutingTrace, load_npz
from promoe.units import format_bandwidth, format_number, format_seconds

# Calibration is judged from so many outcomes (token, layer, expert).
CALIBRATION_OUTCOMES = 500_000


def evaluate(options: Evaluate) -> dict[str, Any]:
    """Evaluate, print a table, write the JSON and the plots, and return what the JSON holds.

    Raises:
        TraceError: the trace cannot be used, or lacks the hidden states that a kind needs.
        UnknownKindError: there is no such kind.
        ConfigError: a trained predictor does not fit, a file cannot be written, or matplotlib is not installed.
    """
    policies = _policies(options)
    transfer = transfer_of(options.bandwidth, options.expert_bytes, options.layer_seconds)
    json_file = None if options.json is None else check_writable(options.json)
    check_kinds(options.kind_names)
    if options.plots is not None:
        from promoe.training.plots import check_plots, save_plots

        check_plots(Path(options.plots))
    trace = open_trace(options.trace)
    fit, held_out = trace.split()
    kinds = prepare(options.kind_names, trace, fit)
    caches = replay_caches(held_out.first(options.replay_tokens), policies, options.cache_rates)
    result = judge(kinds, held_out, options.lookaheads, caches, transfer, options.fetched_counts)
    print(*_conditions(options, transfer, trace, fit, held_out), sep="\n")
    names = [(policy, name_of_rate(rate)) for policy, rate in caches]
    print(*_tables(result, names, transfer is not None, options.fetched_counts), sep="\n")
    for kind, by_lookahead in result.items():
        if silent := [k for k, figures in by_lookahead.items() if figures["accuracy"] is None]:
            print(f"{kind} predicts nothing at k = {', '.join(silent)}")
    if json_file is not None:
        write_atomically(json_file, [json.dumps(result, indent=2), "\n"])
        print(f"written to {json_file}")
    if options.plots is not None:
        written = save_plots(result, Path(options.plots), options.trace)
        print(f"drawn to {', '.join(map(str, written))}")
    return result


def _policies(options: Evaluate) -> list[EvictionName]:
    policies: list[EvictionName] = []
    for name in options.policy_names:
        check_choice("policy", name, get_args(EvictionName))
        policies.append(name)  # type: ignore[arg-type]
    return policies


def open_trace(path: str) -> RoutingTrace:
    """Open a NumPy archive of ids, or a folder that `promoe-train collect` recorded, which also has hidden states.

    Raises:
        TraceError: it cannot be used.
    """
    if not os.path.isdir(path):
        return load_npz(path)
    from promoe.training.recorded_traces import RecordedTrace

    return RecordedTrace(path).routing


def replay_caches(trace: RoutingTrace, policies: Sequence[EvictionName], rates: Sequence[float]) -> Caches:
    """Replay a trace on demand only, under each policy at each cache rate, through the runtime's own scheduler."""
    return {(policy, rate): _residency(trace, policy, rate) for policy in policies for rate in rates}


def _residency(trace: RoutingTrace, policy: EvictionName, cache_rate: float) -> npt.NDArray[np.bool_]:
    """Return whether each expert was in a slot when its layer's gate had chosen, `[num_tokens, num_layers, num_experts]`.

    All layers share one pool, which is empty at first. Nothing is prefetched.
    """
    num_slots = max(1, round(cache_rate * trace.num_layers * trace.num_experts))
    config = SchedulerConfig(
        num_experts=[trace.num_experts] * trace.num_layers,
        chunk_bytes=[(1,)] * trace.num_layers,
        pools=[PoolSpec(num_slots, tuple(range(trace.num_layers)))],
        eviction=policy,
    )
    replay = Replay(config)
    held = np.zeros((trace.num_tokens, trace.num_layers, trace.num_experts), dtype=np.bool_)
    visits = tqdm(
        trace.visits(),
        total=trace.num_tokens * trace.num_layers,
        desc=f"replay {policy} {cache_rate:.1%}",
        unit="visit",
        disable=None,
        leave=False,
    )
    for token_idx, layer_idx, ids in visits:
        held[token_idx, layer_idx] = replay.residency(layer_idx)
        replay.visit(layer_idx, [ids])
    return held


def judge(
    kinds: Mapping[str, Callable[[], Kind]],
    held_out: RoutingTrace,
    lookaheads: Sequence[int],
    caches: Caches,
    transfer: Transfer | None = None,
    fetched: Sequence[int] = (),
) -> dict[str, Any]:
    """Judge kinds at several lookaheads.

    Args:
        kinds: functions that fit a kind, by its name.
        held_out: prompts on which they are not fitted.
        lookaheads: layers between what is known and what is predicted.
        caches: for miss recall and precision.
        transfer: for FETCHRATE and GOODPRED.
        fetched: numbers of experts whose recall is judged.

    Returns:
        `{kind: {"1": {figures, "prefill": {figures}, "decode": {figures}}}}`, where figures are `"accuracy", "exact",
        "coverage_error", "next_token_accuracy"`, the same per layer in `"layers", "exact_layers",
        "coverage_error_layers", "next_token_layers"`, `"recall": {"1": ...}` by number of fetched experts and per layer in
        `"recall_layers"`, `"calibration": {"brier", "layers", "predicted", "observed"}` and `"misses": {policy: {"12.5%":
        {"recall", "precision", "predicted_per_visit", "fetch_rate", "goodpred"}}}`. None where there is nothing to divide by,
        or nothing is predicted or known.
    """
    result: dict[str, Any] = {}
    for name, fit_kind in kinds.items():
        kind = fit_kind()
        asked = lookaheads[:1] if kind.same_for_every_lookahead else lookaheads
        judged = {lookahead: _judge_one(name, kind, held_out, lookahead, caches, fetched) for lookahead in asked}
        result[name] = {}
        for lookahead in lookaheads:
            parts = judged.get(lookahead, judged[asked[0]])
            figures = {part: counted.to_json(lookahead, transfer) for part, counted in parts.items()}
            by_phase = {phase: figures.get(phase) for phase in ("prefill", "decode")}
            result[name][str(lookahead)] = figures["all"] | by_phase
    return result


def _judge_one(
    name: str, kind: Kind, held_out: RoutingTrace, lookahead: int, caches: Caches, fetched: Sequence[int]
) -> dict[str, Figures]:
    """Return figures of all held-out tokens ("all"), and where phases are known of those of "prefill" and "decode"."""
    parts = {"all": Figures(None, held_out.num_layers, caches, fetched)}
    if held_out.generated is not None:
        for phase, tokens in (("prefill", ~held_out.generated), ("decode", held_out.generated)):
            if tokens.any():
                parts[phase] = Figures(tokens, held_out.num_layers, caches, fetched)
    num_outcomes = held_out.num_layers * held_out.num_experts
    sample = spread(held_out.num_tokens, max(1, CALIBRATION_OUTCOMES // num_outcomes))
    continues = np.ones(held_out.num_tokens, dtype=np.bool_)
    continues[held_out.prompt_starts] = False
    layers = tqdm(range(held_out.num_layers), f"judge {name}, k = {lookahead}", unit="layer", disable=None, leave=False)
    for layer_idx in layers:
        needed = used(held_out, layer_idx) > 0
        scores = kind.scores(held_out, layer_idx, lookahead)
        if scores is not None:
            predicted = top(scores, held_out.top_k)
            probabilities = kind.probabilities(scores[sample], layer_idx, lookahead)
            for figures in parts.values():
                figures.add(layer_idx, scores, predicted, needed)
                if probabilities is not None:
                    figures.add_probabilities(layer_idx, sample, probabilities, needed)
        of_next = kind.next_token_scores(held_out, layer_idx, lookahead) if layer_idx < lookahead else None
        if of_next is not None:
            predicted = np.roll(top(of_next, held_out.top_k), 1, axis=0)
            for figures in parts.values():
                figures.add_next_token(layer_idx, continues, predicted, needed)
    return parts


def _conditions(
    options: Evaluate, link: Transfer | None, trace: RoutingTrace, fit: RoutingTrace, held_out: RoutingTrace
) -> list[str]:
    """Return lines that say what was judged, on what."""
    replayed = min(options.replay_tokens, held_out.num_tokens) if options.cache_rates else 0
    lines = [
        f"promoe {promoe.__version__}, {options.trace}: {trace.num_layers} MoE layers, {trace.num_experts} experts, "
        f"top {trace.top_k}",
        f"fitted on {len(fit.prompt_lengths):,} prompts ({fit.num_tokens:,} tokens), judged on "
        f"{len(held_out.prompt_lengths):,} ({held_out.num_tokens:,})"
        + (f", misses on the first {replayed:,} of them" if replayed else ""),
    ]
    if link is not None:
        lines.append(
            f"link of {format_bandwidth(link.bandwidth_bytes_per_s)}, experts of "
            f"{format_number(link.expert_bytes / 1e6)} MB, {format_seconds(link.layer_s)} from layer to layer"
        )
    notes = (note_on_training(name, trace) for name in dict.fromkeys(options.kind_names))
    return lines + [note for note in notes if note]


def _tables(
    result: dict[str, Any], caches: Sequence[tuple[str, str]], has_link: bool, fetched: Sequence[int]
) -> list[str]:
    """Return the lines of a table, and of further ones if a link or numbers of fetched experts are given."""
    columns = accuracy_columns(result) + cache_columns(caches, " misses", "recall", "precision")
    words = ["misses: of what that cache does not hold, recall/precision in %"] if caches else []
    lines = ["", *table(result, columns), "", *legend(columns, *words)]
    if has_link and caches:
        columns = cache_columns(caches, "", "goodpred", "fetch_rate")
        words = [
            "GOODPRED/FETCHRATE in %: FETCHRATE is the share of the predicted experts absent from that cache that arrive "
            "within k layers, GOODPRED accuracy times that"
        ]
        lines += ["", *table(result, columns), "", *legend(columns, *words)]
    if fetched:
        columns = recall_columns(fetched)
        words = [
            "recall: share of the experts used that are among so many fetched, those with the highest scores, in layers that "
            "are predicted from exactly k layers before"
        ]
        lines += ["", *table(result, columns), "", *legend(columns, *words)]
    return lines
