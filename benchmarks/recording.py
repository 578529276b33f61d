"""What recording for the report costs: spans of a timeline, scores of forecasts, experts over time.

    python benchmarks/recording.py [--passes 2000]

Runs the recorder, the tracer and the scoring alone, without a model, for two sizes of model. Printed, in microseconds of one
core: a span; a forecast scored, which happens where the next forecast is made; what a visit pays for it; and what the beginning
of a decode pass costs (median, mean, and the longest, when stretches are joined), of which each layer visit has its share.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable
from statistics import mean, median

import numpy as np

from promoe.scheduler.forecast_accuracy import ForecastAccuracy
from promoe.stats.recorder import Recorder
from promoe.stats.tracing import COMPUTE, latest_passes

SIZES = ((12, 32, 4), (48, 128, 8))
REPEATS, CALLS = 7, 2000


def quickest_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def begin_pass_us(layers: int, experts: int, top_k: int, passes: int) -> list[float]:
    recorder = Recorder([experts] * layers, [1] * layers)
    times_us = []
    for _ in range(passes):
        start_s = time.perf_counter()
        recorder.begin_pass("decode", 1, 1)
        times_us.append((time.perf_counter() - start_s) * 1e6)
        for layer in range(layers):
            recorder.visit(layer, range(top_k), 1, 1, 0.0)
        recorder.end_pass(0.1)
    return times_us


def measure(layers: int, experts: int, top_k: int, passes: int) -> dict[str, float]:
    tracer = latest_passes("cost")
    recorder = Recorder([experts] * layers, [1] * layers)
    accuracy = ForecastAccuracy(recorder)
    probabilities = np.random.default_rng(0).random(experts)
    ids = list(range(top_k))

    def scored() -> None:
        accuracy.forecast(0, 1, probabilities)
        accuracy.visited(0, ids)

    # What a shared machine adds to a pass, it does not add to the same one again and again.
    begin_us = [
        min(same) for same in zip(*(begin_pass_us(layers, experts, top_k, passes) for _ in range(5)), strict=True)
    ]
    return {
        "a span of a timeline": quickest_us(
            lambda: tracer.span(COMPUTE, "experts L3", 1.0, 2.0, layer=3, experts=top_k, tokens=1)
        ),
        "a visit counted": quickest_us(lambda: recorder.visit(0, ids, 1, 1, 0.0)),
        "a forecast scored": quickest_us(scored),
        "of that, in the forward": quickest_us(lambda: accuracy.visited(1, ids)),
        "a pass begins, median": median(begin_us),
        "a pass begins, mean": mean(begin_us),
        "a pass begins, longest": max(begin_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=2000)
    passes = parser.parse_args().passes
    columns = {f"{layers} x {experts}": measure(layers, experts, top_k, passes) for layers, experts, top_k in SIZES}
    print(f"{'us':26}" + "".join(f"{name:>12}" for name in columns))
    for row in next(iter(columns.values())):
        print(f"{row:26}" + "".join(f"{column[row]:12.2f}" for column in columns.values()))


if __name__ == "__main__":
    main()
