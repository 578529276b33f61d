"""`promoe simulate`: reads a trace, simulates, prints a few lines and writes JSON."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.simulate.machine import Geometry, geometry_of, machine_of
from promoe.commands.simulate.options import Options
from promoe.commands.simulate.run import Scenario, needs_fit, simulate
from promoe.errors import ConfigError
from promoe.files import write_atomically
from promoe.model.placement import other_tensors
from promoe.training.evaluate import open_trace
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import RoutingTrace
from promoe.training.trace_folder import model_folder
from promoe.units import aligned, format_megabytes, format_number, format_seconds, format_share, format_times, ratio

# Policies that are fitted on other prompts.
FITTED = ("default", "next_use", "static")
# Prompts that predictors are fitted on where no other trace is given.
FIT_SHARE = 0.7


def run_simulation(options: Options, out: TextIO | None = None) -> dict[str, Any]:
    """Simulate, print to `out` (None: stdout), write the JSON, and return what it holds.

    Raises:
        TraceError: a trace cannot be read.
        ConfigError: an option does not fit the others, or the trace.
    """
    model = _model(options)
    predictor = None if options.predictor == "none" else options.predictor
    machine, trace = machine_of(options.hardware), open_trace(options.trace)
    geometry = geometry_of(model, trace.num_layers, trace.num_experts, trace.top_k)
    if options.bits is not None:
        geometry = replace(geometry, bits_per_weight=options.bits)
        if geometry.expert_bytes < 1:
            raise ConfigError(f"With --bits {options.bits:g} an expert would take no bytes. Give more.")
    scenario = Scenario(
        machine, geometry, _rate(options.cache), options.policy, predictor, options.lookahead, options.batch
    )
    fit, reuse, note = None, None, None
    if options.fit is not None and options.policy not in FITTED and not needs_fit(predictor):
        raise ConfigError(
            f"--policy {options.policy} without a predictor is fitted on nothing. Leave out --fit, or simulate one of "
            f"{', '.join(FITTED)}."
        )
    if options.fit is not None:
        fit = replace(
            _same_model(open_trace(options.fit), trace, geometry, options.fit), num_experts=geometry.num_experts
        )
        reuse = fit_reuse(fit) if options.policy in ("default", "next_use") else None
    elif needs_fit(predictor):
        fit, trace = trace.split(FIT_SHARE)
        fit = replace(fit, num_experts=geometry.num_experts)
        note = f"{predictor} was fitted on the first {FIT_SHARE:.0%} of the prompts; the rest are simulated"
    elif options.policy == "static":
        note = (
            "static keeps what these very tokens use most: no popularity can be better (--fit FILE for an honest one)"
        )
    if options.max_tokens is not None:
        trace = trace.first(options.max_tokens)
    result = simulate(scenario, trace, fit, reuse)
    print(*_lines(result, note), sep="\n", file=out)
    if options.json is not None:
        write_atomically(options.json, [json.dumps(result, indent=2), "\n"])
        print(f"written to {options.json}", file=out)
    return result


def _model(options: Options) -> str | Geometry:
    """Return the preset's name, or the sizes of the model that is named or that the recorded trace names."""
    model = options.model
    if model == "auto" and os.path.isdir(options.trace):
        model = model_folder(Path(options.trace)) or model
    return read_geometry(model) if os.path.exists(model) or "/" in model else model


def read_geometry(path_or_id: str) -> Geometry:
    """Read a model's sizes from the headers of a checkpoint's files, or from its config.json alone. Reads no weights.

    Args:
        path_or_id: folder of a checkpoint, a GGUF file, or a hub id.

    Raises:
        PromoeError: there is neither, it is not of a model that promoe can serve, or its layers are not of one size.
    """
    read = read_model(path_or_id)
    if read.store is not None:
        read.store.close()
    sizes = {(layer.num_experts, layer.top_k, layer.layout, layer.stored_bytes) for layer in read.sizes.layers}
    if len(sizes) > 1:
        raise ConfigError(
            f"The MoE layers of {path_or_id} are not all of one size, which the simulator takes them to be. Give --model a "
            "preset that comes near, or leave it out."
        )
    ((num_experts, top_k, layout, stored_bytes),) = sizes
    parameters = float(sum(math.prod(spec.shape) for spec in layout.tensors))
    return Geometry(
        name=path_or_id,
        num_layers=len(read.layers),
        num_experts=num_experts,
        top_k=top_k,
        expert_parameters=parameters,
        other_parameters=_read_by_every_token(read),
        bits_per_weight=8 * stored_bytes / parameters,
    )


def _read_by_every_token(read: ReadModel) -> float:
    """Return the parameters of all but the routed experts, and but the table of which a token reads one row."""
    count = sum(tensor.numel() for tensor in other_tensors(read.model, read.layers))
    table, head = read.model.get_input_embeddings().weight, read.model.get_output_embeddings()
    return float(count if head is not None and head.weight is table else count - table.numel())


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
