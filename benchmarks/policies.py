"""What each eviction policy misses on recorded routing, and how much of the way from LRU to Belady it closes.

    python benchmarks/policies.py TRACE ... [--rates 12.5 25 37.5 50 75] [--policies NAME ...] [--report 30] [--max-tokens N]
        [--json FILE]

Prints two tables per trace: misses per token of each policy and cache, with percent of the way from LRU's to Belady's
misses in brackets; and milliseconds per token of a simulated RTX 4090, with their bound.

The last `--report` percent of each trace's prompts are replayed, token by token, beginning with an empty cache. The
other prompts are what the start of the reuse prior was fitted on, and what `static` knows. LRU, LFU, LFRU, static and
Belady have int(E x rate) slots per layer, the default as many in one pool that all layers share. "default, fitted" has
learned from the other prompts, as `promoe-train fit` lets it; "default, token" (or another predictor that needs ids
only) is fitted on them and forecasts one layer ahead.

Takes some minutes for 4,000 tokens; the policies run side by side on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import make_parser, print_table, save

from promoe.commands.simulate.machine import MACHINES, geometry_of
from promoe.commands.simulate.run import Scenario, simulate
from promoe.training.evaluate import open_trace
from promoe.training.reuse import fit_reuse
from promoe.units import format_ms

FITTED = "default, fitted"
POLICIES = ("lru", "lfu", "lfru", "static", "default", FITTED, "belady")
Found = Mapping[tuple[str, float], dict[str, Any]]


def run(path: str, policy: str, rate: float, report: float, max_tokens: int | None) -> dict[str, Any]:
    """Simulate one policy and cache; all shares are between 0 and 1."""
    trace = replace(open_trace(path), generated=None)
    fit, held_out = trace.split(1 - report)
    held_out = held_out if max_tokens is None else held_out.first(max_tokens)
    geometry = geometry_of("auto", trace.num_layers, trace.num_experts, trace.top_k)
    reuse = fit_reuse(fit, geometry.num_experts) if policy == FITTED else None
    name, _, predictor = policy.partition(", ")
    named = predictor if predictor and policy != FITTED else None
    scenario = Scenario(MACHINES["rtx-4090"], geometry, rate, name, named)  # type: ignore[arg-type]
    return simulate(scenario, held_out, replace(fit, num_experts=geometry.num_experts), reuse)


def print_found(
    title: str, found: Found, policies: Sequence[str], rates: Sequence[float], cell: Callable[[str, float], str]
) -> None:
    """Print a table with a row per policy and a column per cache."""
    print(title)
    head = ("policy", *(f"{rate:g}%" for rate in rates))
    print_table([head, *((policy, *(cell(policy, rate) for rate in rates)) for policy in policies)])


def show(path: str, found: Found, policies: Sequence[str], rates: Sequence[float]) -> None:
    def missed(policy: str, rate: float) -> str:
        own, lru, belady = (found[name, rate]["misses_per_token"] for name in (policy, "lru", "belady"))
        return f"{own:.2f} ({100 * (lru - own) / (lru - belady):.0f}%)"

    def time(policy: str, rate: float) -> str:
        return f"{format_ms(found[policy, rate]['tpot_s'])} ({format_ms(found[policy, rate]['bound_s'])})"

    some = next(iter(found.values()))
    print(f"\n{Path(path).name}: {some['model']}, {some['tokens']:,} tokens of {some['prompts']:,} prompts")
    print_found("misses per token (and percent of the way from LRU to Belady)", found, policies, rates, missed)
    print_found(f"TPOT, ms, on {some['hardware']} (and its bound)", found, policies, rates, time)


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--rates", nargs="*", type=float, default=[12.5, 25, 37.5, 50, 75], help="cache, percent")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--report", type=float, default=30, help="percent of the prompts")
    parser.add_argument("--max-tokens", type=int)
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
            results[path] = {f"{policy} {rate:g}%": one for (policy, rate), one in found.items()}
            show(path, found, options.policies, options.rates)
    save(options.json, results)


if __name__ == "__main__":
    main()
