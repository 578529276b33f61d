"""What each eviction policy misses on recorded routing, and how much of the way from LRU to Belady it closes.

    python benchmarks/policies.py TRACE ... [--rates 12.5 25 37.5 50 75] [--report 30] [--max-tokens N] [--json FILE]

The last `--report` per cent of each trace's prompts are replayed (the rest is what the start of the reuse prior was fitted
on, and what `static` knows). LRU, LFU, LFRU, static and Belady have int(E x rate) slots per layer, the default as many in
one pool that all layers share; "default, fitted" has learned from the prompts before, as `promoe-train fit` lets it. A
layer's experts are one event; caches are empty at first; every token is decoded by itself. A predictor by name (as in
"default, token") is fitted on the prompts before, too, and forecasts one layer ahead. "default, per layer" gives each layer its
own int(E x rate) slots, "default, quotas" as many in all, but to each layer what its hit curve on the prompts before makes of
them: slot by slot to the layer that LRU would gain most hits in.
"""

from __future__ import annotations

import argparse
import heapq
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import on_the_way, save

from promoe.commands.simulate.machine import MACHINES, geometry_of
from promoe.commands.simulate.run import Scenario, simulate
from promoe.training.evaluate import open_trace
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned, format_ms

FITTED, PER_LAYER, QUOTAS = "default, fitted", "default, per layer", "default, quotas"
# Enough for the shape of a layer's hit curve.
QUOTA_TOKENS = 20_000
POLICIES = ("lru", "lfu", "lfru", "static", "default", FITTED, PER_LAYER, QUOTAS, "belady")


def hit_curve(experts: npt.NDArray[Any], num_experts: int) -> npt.NDArray[np.int64]:
    """Hits that each further slot adds under LRU, `[num_experts]`; `experts[num_tokens, top_k]` of one layer."""
    last_used, gained = -np.arange(1, num_experts + 1), np.zeros(num_experts, dtype=np.int64)
    for token, ids in enumerate(experts):
        distance = np.count_nonzero(last_used[None, :] > last_used[ids][:, None], axis=1)
        gained[distance[last_used[ids] > 0]] += 1
        last_used[ids] = token * len(ids) + np.arange(1, len(ids) + 1)
    return gained


def quotas(fit: RoutingTrace, num_experts: int, slots: int) -> tuple[int, ...]:
    """`slots` over the layers, each at least one, by what LRU would gain on `fit`."""
    curves = [hit_curve(fit.experts[:QUOTA_TOKENS, layer], num_experts) for layer in range(fit.num_layers)]
    found = [1] * fit.num_layers
    waiting = [(-int(curve[1]), layer) for layer, curve in enumerate(curves)]
    heapq.heapify(waiting)
    for _ in range(slots - len(found)):
        _, layer = heapq.heappop(waiting)
        found[layer] += 1
        if found[layer] < num_experts:
            heapq.heappush(waiting, (-int(curves[layer][found[layer]]), layer))
    return tuple(found)


def run(path: str, policy: str, rate: float, report: float, max_tokens: int | None) -> dict[str, Any]:
    trace = replace(open_trace(path), generated=None)
    fit, held_out = trace.split(1 - report)
    held_out = held_out if max_tokens is None else held_out.first(max_tokens)
    geometry = geometry_of("auto", trace.num_layers, trace.num_experts, trace.top_k)
    name, _, more = policy.partition(", ")
    reuse = fit_reuse(fit, geometry.num_experts) if policy == FITTED else None
    predictor = more if more and policy not in (FITTED, PER_LAYER, QUOTAS) else None
    fit = replace(fit, num_experts=geometry.num_experts)
    scenario = Scenario(MACHINES["rtx-4090"], geometry, rate, name, predictor)  # type: ignore[arg-type]
    slots = scenario.slots_per_layer
    if policy == PER_LAYER:
        scenario = replace(scenario, quotas=(slots,) * trace.num_layers)
    elif policy == QUOTAS:
        scenario = replace(scenario, quotas=quotas(fit, geometry.num_experts, slots * trace.num_layers))
    return simulate(scenario, held_out, fit, reuse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--rates", nargs="*", type=float, default=[12.5, 25, 37.5, 50, 75], help="cache, per cent")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--report", type=float, default=30, help="per cent of the prompts")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/policies.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for path in options.traces:
            jobs = {
                (policy, rate): workers.submit(run, path, policy, rate / 100, options.report / 100, options.max_tokens)
                for rate in options.rates
                for policy in dict.fromkeys((*options.policies, "lru", "belady"))
            }
            found = {key: job.result() for key, job in jobs.items()}
            results[path] = {f"{policy} {rate:g}%": result for (policy, rate), result in found.items()}
            some = next(iter(found.values()))
            print(f"\n{Path(path).name}: {some['model']}, {some['tokens']:,} tokens of {some['prompts']:,} prompts")
            print("misses per token (and per cent of the way from LRU to Belady)")
            rows = [("policy", *(f"{rate:g}%" for rate in options.rates))]
            for policy in options.policies:
                cells = []
                for rate in options.rates:
                    misses = (found[name, rate]["misses_per_token"] for name in (policy, "lru", "belady"))
                    cells.append(on_the_way(*misses))
                rows.append((policy, *cells))
            print("\n".join(aligned(rows)))
            print(f"TPOT, ms, on {some['hardware']} (and its bound)")
            times = [rows[0]]
            for policy in options.policies:
                here = [found[policy, rate] for rate in options.rates]
                times.append((policy, *(f"{format_ms(one['tpot_s'])} ({format_ms(one['bound_s'])})" for one in here)))
            print("\n".join(aligned(times)), flush=True)
    save(options.json, results)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
