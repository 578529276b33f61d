"""What a batch, and fewer bits per weight, change: simulated on recorded routing.

    python benchmarks/sweeps.py TRACE ... [--cache 25] [--batches 1 2 4 8] [--bits 16 8 4.25] [--prompts 16]
                                [--prompt-tokens 60] [--json FILE]

Per trace two tables: sequences generated together, with as many slots; and bits per weight of the experts, with as many
*bytes* of slots, so that fewer bits are more slots. The first tokens of some prompts of the last 30 per cent are simulated,
the other 70 are what predictors are fitted on. Machine: RTX 4090 over PCIe 4.0, as in `promoe simulate`.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import save

from promoe.commands.simulate.machine import MACHINES, geometry_of
from promoe.commands.simulate.run import Scenario, simulate
from promoe.training.evaluate import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned, format_megabytes, format_ms, format_percent, format_times, ratio

SYSTEMS = {"lru": ("lru", None), "next-use": ("default", None), "next-use, token": ("default", "token")}
FIT_SHARE, FULL_BITS = 0.7, 16.0


def shortened(trace: RoutingTrace, prompts: int, tokens: int) -> RoutingTrace:
    """The first tokens of each of the first prompts, so that a batch stays full for long."""
    starts, lengths = trace.prompt_starts[:prompts], np.minimum(trace.prompt_lengths[:prompts], tokens)
    rows = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    return replace(trace, experts=trace.experts[rows], token_ids=trace.token_ids[rows], prompt_lengths=lengths)


def run(path: str, system: str, cache: float, batch: int, bits: float, prompts: int, tokens: int) -> dict[str, Any]:
    trace = replace(open_trace(path), generated=None)
    fit, held_out = trace.split(FIT_SHARE)
    geometry = geometry_of("auto", trace.num_layers, trace.num_experts, trace.top_k)
    rate = min(1.0, cache * FULL_BITS / bits)
    policy, predictor = SYSTEMS[system]
    scenario = Scenario(
        MACHINES["rtx-4090"],
        replace(geometry, bits_per_weight=bits),
        rate,
        policy,  # type: ignore[arg-type]
        predictor,
        batch=batch,
    )
    return simulate(scenario, shortened(held_out, prompts, tokens), replace(fit, num_experts=geometry.num_experts))


def show(title: str, found: dict[Any, dict[str, Any]]) -> None:
    head = ("system", "hit %", "MB/token", "pass, ms", "x bound", "stall %", "tokens/s")
    rows = [(title, *head)]
    for (value, system), one in found.items():
        pass_s = one["tpot_s"]
        rows.append(
            (
                f"{value:g}",
                system,
                format_percent(one["hit_rate"]),
                format_megabytes(one["bytes_per_token"]),
                format_ms(pass_s),
                format_times(ratio(pass_s, one["bound_s"])).removesuffix("x"),
                format_percent(ratio(one["stall_s"], pass_s)),
                f"{one['sequences_per_pass'] / pass_s:.1f}",
            )
        )
    print("\n".join(aligned(rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--cache", type=float, default=25, help="per cent of the routed experts, at 16 bits")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--bits", nargs="*", type=float, default=[16, 8, 4.25])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=60, help="of each prompt, at most")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/sweeps.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    cache = options.cache / 100
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for path in options.traces:
            sweeps = {
                "batch": [(batch, batch, FULL_BITS) for batch in options.batches],
                "bits": [(bits, 1, bits) for bits in options.bits],
            }
            jobs = {
                (sweep, value, system): workers.submit(
                    run, path, system, cache, batch, bits, options.prompts, options.prompt_tokens
                )
                for sweep, settings in sweeps.items()
                for value, batch, bits in settings
                for system in SYSTEMS
            }
            for sweep in sweeps:
                found = {key[1:]: job.result() for key, job in jobs.items() if key[0] == sweep}
                one = next(iter(found.values()))
                print(f"\n{Path(path).name}: {one['model']} on {one['hardware']}, cache {options.cache:g}%")
                show(sweep, found)
                results[f"{path} {sweep}"] = {f"{value:g} {system}": row for (value, system), row in found.items()}
    save(options.json, results)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
