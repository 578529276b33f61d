"""What a cache misses when a trained predictor foresees the reuse of experts, on demand only.

    python benchmarks/foreseen_reuse.py TRACE RUN [--rates 12.5 25 50 75] [--max-tokens 4000] [--json FILE]

TRACE is a folder of `promoe-train collect`, RUN one of `promoe-train fit` (or a trained predictor). The last fifth of the
prompts, which no predictor was fitted on, is decoded token by token, beginning with an empty cache. "default" and its
variants share one pool between the layers, LRU and Belady have as many slots per layer: "fitted" has learned from the
other prompts what eviction goes by, but for hidden states; "foreseen" goes by these, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import on_the_way, save

from promoe.commands.simulate import belady
from promoe.predictors import TrainedPredictor
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.scheduler.reuse import LearnedReuse
from promoe.training.kinds import folder_of_predictor
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned


def misses_per_token(
    trace: RoutingTrace,
    rate: float,
    policy: EvictionName = "next_use",
    reuse: LearnedReuse | None = None,
    log_odds: np.ndarray | None = None,
) -> float:
    """Of a cache that holds this share of the experts; `log_odds[num_layers, num_tokens, num_experts]` are foreseen."""
    layers, slots = range(trace.num_layers), int(rate * trace.num_experts + 1e-9)
    shared = [PoolSpec(slots * len(layers), tuple(layers))]
    replay = Replay(
        SchedulerConfig(
            num_experts=[trace.num_experts] * len(layers),
            chunk_bytes=[(1,)] * len(layers),
            pools=shared if policy == "next_use" else [PoolSpec(slots, (layer_idx,)) for layer_idx in layers],
            eviction=policy,
        ),
        reuse,
    )
    missed = 0
    for token_idx, layer_idx, ids in trace.visits():
        if log_odds is not None:
            replay.foresee_reuse(layer_idx, log_odds[layer_idx, token_idx])
        missed += replay.visit(layer_idx, [ids])
    return missed / trace.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("run")
    parser.add_argument("--rates", nargs="*", type=float, default=[12.5, 25, 50, 75], help="cache, per cent")
    parser.add_argument("--max-tokens", type=int, default=4000)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/foreseen_reuse.json"))
    options = parser.parse_args()
    recorded = RecordedTrace(options.trace)
    fit, held_out = recorded.routing.split()
    held_out = held_out.first(options.max_tokens)
    predictor = TrainedPredictor.load(str(folder_of_predictor(options.run))).float()
    rows = slice(held_out.first_row, held_out.first_row + held_out.num_tokens)
    with torch.inference_mode():
        log_odds = predictor.reuse_log_odds(recorded.gate_inputs(rows)).numpy()
    fitted, foreseen = fit_reuse(fit), predictor.learned_reuse()
    results: dict[str, dict[str, float]] = {}
    for rate in options.rates:
        share = rate / 100
        slots = int(share * held_out.num_experts + 1e-9)
        results[f"{rate:g}%"] = {
            "lru": misses_per_token(held_out, share, "lru"),
            "default": misses_per_token(held_out, share),
            "default, fitted": misses_per_token(held_out, share, reuse=fitted),
            "default, foreseen": misses_per_token(held_out, share, reuse=foreseen, log_odds=log_odds),
            "belady": belady.misses(held_out.experts, held_out.num_experts, slots).sum() / held_out.num_tokens,
        }
    print(f"{held_out.num_tokens:,} tokens; misses per token (and per cent of the way from LRU to Belady)")
    table = [("policy", *results)]
    for policy in next(iter(results.values())):
        cells = (on_the_way(found[policy], found["lru"], found["belady"]) for found in results.values())
        table.append((policy, *cells))
    print("\n".join(aligned(table)))
    save(options.json, results)
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
