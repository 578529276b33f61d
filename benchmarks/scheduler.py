"""What the scheduler costs the host: microseconds per operation, with a made-up routing and no link.

All of it runs under the engine's lock while a model decodes. Calls are timed one by one; on a machine that is not
idle, read the 10th percentile.

    python benchmarks/scheduler.py [--tokens N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from promoe.scheduler import ExpertKey, PoolSpec, Scheduler, SchedulerConfig

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_CHUNKS = 48, 128, 8, 3
CACHE_RATE = 0.25
# Share of a token's experts that the token before used too.
PERSISTENCE = 0.4
PAIR_BOUND_US = 15.0
LAYER_BOUND_US = 40.0


class Timings:
    """Seconds of single calls, by the name of the operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        """Time the block once, for all these names."""
        start_s = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - start_s
        for name in names:
            self.seconds[name].append(elapsed_s)

    def summary(self) -> dict[str, dict[str, float]]:
        """Quantiles by name."""
        return {name: quantiles_us(np.array(seconds)) for name, seconds in self.seconds.items()}


def quantiles_us(seconds: np.ndarray) -> dict[str, float]:
    p10, median, p90 = np.quantile(seconds, [0.1, 0.5, 0.9]) * 1e6
    return {
        "p10_us": round(float(p10), 2),
        "median_us": round(float(median), 2),
        "p90_us": round(float(p90), 2),
        "calls": len(seconds),
    }


def new_scheduler(num_slots: int, num_layers: int = NUM_LAYERS) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_experts=[NUM_EXPERTS] * num_layers,
            chunk_bytes=[(1 << 20,) * NUM_CHUNKS] * num_layers,
            pools=[PoolSpec(num_slots, tuple(range(num_layers)))],
        )
    )


def routing(seed: int, num_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Layer visits of a decode: (layer, its distinct experts)."""
    rng = np.random.default_rng(seed)
    latest = [rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(NUM_LAYERS)]
    for _ in range(num_tokens):
        for layer_idx, ids in enumerate(latest):
            kept = ids[rng.random(TOP_K) < PERSISTENCE]
            fresh = rng.permutation(np.setdiff1d(np.arange(NUM_EXPERTS), kept))[: TOP_K - len(kept)]
            latest[layer_idx] = np.sort(np.concatenate([kept, fresh]))
            yield layer_idx, latest[layer_idx].tolist()


def decode(num_tokens: int, with_forecasts: bool) -> dict[str, dict[str, float]]:
    """Steady state at 6,144 experts: `next_chunks(1)` with its `chunk_done`, and the rest of a layer.

    The first pair after a layer event that needs a victim orders the pool's residents by eviction score; pairs that
    paid for it are "ordering". With forecasts, each layer forecasts the next three, and six speculative pairs follow.
    """
    scheduler = new_scheduler(round(CACHE_RATE * NUM_LAYERS * NUM_EXPERTS))
    rng = np.random.default_rng(1)
    timings = Timings()
    for visit_idx, (layer_idx, ids) in enumerate(routing(0, num_tokens)):
        if visit_idx == num_tokens // 3 * NUM_LAYERS:
            timings = Timings()  # from here on the cache is full and the routing known
        with timings.timed("layer: hint, begin_visit, admit, ready"):
            scheduler.hint(layer_idx, ids)
            visit = scheduler.begin_visit(layer_idx, ids)
            visit.admit()
            group = visit.ready()
        ordered = False
        while not visit.finished:
            visit.release(group)
            if visit.finished:
                break
            name = "pair: no ordering" if ordered else "pair: ordering"
            with timings.timed(name, "pair: all"):
                (lease,) = scheduler.next_chunks(1)
                scheduler.chunk_done(lease)
            ordered = True
            group = visit.ready()
        visit.close()
        if with_forecasts:
            for steps_ahead in (3, 2, 1):
                probabilities = rng.random(NUM_EXPERTS) ** 4
                with timings.timed("forecast"):
                    scheduler.forecast(steps_ahead, (layer_idx + steps_ahead) % NUM_LAYERS, probabilities)
            for _ in range(6):
                with timings.timed("pair: speculative"):
                    for lease in scheduler.next_chunks(1):
                        scheduler.chunk_done(lease)
    return timings.summary()


def one_layer(num_slots: int, num_missing: int, repeats: int) -> dict[str, float]:
    """All that one decode visit of one layer costs, of 100 layers, `num_missing` of its experts being absent."""
    num_layers = 100
    scheduler = new_scheduler(num_slots, num_layers)
    full = [ExpertKey(*divmod(idx, NUM_EXPERTS)) for idx in range(num_slots)]
    scheduler.warm(full)
    while leases := scheduler.next_chunks(1):
        scheduler.chunk_done(leases[0])
    rng = np.random.default_rng(2)
    timings = Timings()
    for _ in range(repeats):
        resident = np.array([scheduler.is_resident(0, expert_idx) for expert_idx in range(NUM_EXPERTS)])
        order = rng.permutation(NUM_EXPERTS)
        missing = order[~resident[order]][:num_missing]
        ids = np.concatenate([missing, order[resident[order]][: TOP_K - len(missing)]]).tolist()
        with timings.timed("layer"):
            scheduler.hint(0, ids)
            visit = scheduler.begin_visit(0, ids)
            visit.admit()
            visit.release(visit.ready())
            while not visit.finished:
                scheduler.chunk_done(scheduler.next_chunks(1)[0])
                visit.release(visit.ready())
            visit.close()
    return quantiles_us(np.array(timings.seconds["layer"]))


def scaling(repeats: int) -> dict[str, dict[str, float]]:
    """`one_layer` from E to 100 E slots. Where every expert of the layer has a slot, none can be missing."""
    found = {}
    for factor in (1, 10, 100):
        found[f"{factor} E slots, all resident"] = one_layer(factor * NUM_EXPERTS, 0, repeats)
    for factor in (1, 10, 99):
        scheduler_slots = factor * NUM_EXPERTS - NUM_EXPERTS // 2
        found[f"{factor} E slots, one miss"] = one_layer(scheduler_slots, 1, repeats)
    return found


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    lines = [title, f"  {'':42s}{'p10':>9s}{'median':>9s}{'p90':>9s}   calls"]
    for name, row in rows.items():
        figures = "".join(f"{row[key]:9.1f}" for key in ("p10_us", "median_us", "p90_us"))
        lines.append(f"  {name:42s}{figures}   {row['calls']:.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60, help="tokens decoded per case")
    parser.add_argument(
        "--json", type=Path, default=Path("promoe-out/benchmarks/scheduler.json"), help="where to write"
    )
    args = parser.parse_args()
    results = {
        "decode, no prefetch": decode(args.tokens, with_forecasts=False),
        "decode, three forecasts per layer": decode(args.tokens, with_forecasts=True),
        "whole visit of one layer": scaling(repeats=20 * args.tokens),
    }
    print(
        f"Scheduler, microseconds. {NUM_LAYERS} layers x {NUM_EXPERTS} experts, top-{TOP_K}, {NUM_CHUNKS} chunks per "
        f"expert, {CACHE_RATE:.0%} cache, next_use; Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    for title, rows in results.items():
        print(table(title, rows))
    pair = results["decode, no prefetch"]["pair: all"]["median_us"]
    layer = results["whole visit of one layer"]["10 E slots, all resident"]["median_us"]
    print(f"next_chunks + chunk_done: {pair:.1f} us (bound {PAIR_BOUND_US:.0f})")
    print(f"one layer, all resident:  {layer:.1f} us (bound {LAYER_BOUND_US:.0f})")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"load": os.getloadavg(), "python": sys.version, **results}, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
