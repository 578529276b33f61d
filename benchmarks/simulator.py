"""What `promoe simulate` costs: microseconds of one core per layer visit, by policy.

    python benchmarks/simulator.py TRACE ... [--rates 25 50] [--policies ...] [--max-tokens 2000] [--repeats 3] [--json FILE]

A predictor by name (as in "default, token") is fitted on the first prompts that are not simulated, which is not timed.
The quickest of some runs counts, by the clock of the process, since neighbours on the machine only ever add to it.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from common import save

from promoe.commands.simulate.machine import MACHINES, geometry_of
from promoe.commands.simulate.options import PolicyName
from promoe.commands.simulate.run import Scenario, simulate
from promoe.training.evaluate_command import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned

POLICIES = (*get_args(PolicyName), "default, token")
BOUND_US = 120.0


def visit_us(trace: RoutingTrace, fit: RoutingTrace, policy: str, rate: float, repeats: int) -> dict[str, Any]:
    """The quickest of some simulations, and what it found."""
    geometry = geometry_of("auto", trace.num_layers, trace.num_experts, trace.top_k)
    name, _, predictor = policy.partition(", ")
    scenario = Scenario(MACHINES["rtx-4090"], geometry, rate, name, predictor or None)  # type: ignore[arg-type]
    fit = replace(fit, num_experts=geometry.num_experts)
    seconds, found = [], {}
    for _ in range(repeats):
        start_s = time.process_time()
        found = simulate(scenario, trace, fit if predictor else None)
        seconds.append(time.process_time() - start_s)
    return {"us_per_visit": min(seconds) / found["layer_visits"] * 1e6, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--rates", nargs="*", type=float, default=[25, 50], help="cache, per cent")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/simulator.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for path in options.traces:
        fit, held_out = replace(open_trace(path), generated=None).split(0.7)
        trace, fit = held_out.first(options.max_tokens), fit.first(20 * options.max_tokens)
        found = {
            (policy, rate): visit_us(trace, fit, policy, rate / 100, options.repeats)
            for policy in options.policies
            for rate in options.rates
        }
        results[path] = {f"{policy} {rate:g}%": result for (policy, rate), result in found.items()}
        visits = trace.num_tokens * trace.num_layers
        print(f"\n{Path(path).name}: {visits:,} layer visits; microseconds per visit (bound {BOUND_US:.0f})")
        rows = [("policy", *(f"{rate:g}%" for rate in options.rates))]
        for policy in options.policies:
            rows.append((policy, *(f"{found[policy, rate]['us_per_visit']:.1f}" for rate in options.rates)))
        print("\n".join(aligned(rows)), flush=True)
    save(options.json, {"load": os.getloadavg(), **results})
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
