"""How sure a test of prefetch is: what it says after some rounds, if passes are compared as they are, or as `governor` does.

    python benchmarks/governing.py [--caches 25% 50% 75%] [--prompts 14] [--new-tokens 41] [--resamples 400]
        [--out promoe-out] [--json promoe-out/benchmarks/governing.json]

The widened demo model decodes held-out prompts, its experts read past the page cache, with prefetch switched on and off by the
governor's own pattern of trials (answers are no whole number of rounds long, so that each setting meets all parts of them).
Printed per cache: the mean milliseconds and fetched megabytes of a pass with prefetch and without; how far passes without it
scatter, as they are and as if all had fetched as much; what prefetch saves of the median pass, compared either way, with 95%
bootstrap intervals over rounds; and of tests made of 1, 2 and 4 rounds, drawn with replacement, the share that says "on".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
import transformers
from common import save, widened_demo
from transformers import PreTrainedModel

import promoe
from promoe.scheduler.governor import (
    ROUND_TRIALS,
    SETTLING_PASSES,
    TRIAL_PASSES,
    Pass,
    is_as_first,
    saved,
    scatter,
    seconds_per_byte,
)
from promoe.units import aligned

MOST_PROMPT_TOKENS = 64  # the rest of a prompt is cut off
ROUND_PASSES = ROUND_TRIALS * TRIAL_PASSES
ROUNDS = (1, 2, 4)
PLAIN = ("with_ms", "without_ms", "with_mb", "without_mb", "scatter_ms", "scatter_adjusted_ms")


class Sample(NamedTuple):
    """A pass that counts."""

    on: bool
    passed: Pass


Round = list[Sample]
Comparison = Callable[[Sequence[Pass], Sequence[Pass]], float]


def setting_of(number: int) -> bool:
    """Whether prefetch is on in a pass of that number, in tests that begin with it and follow each other."""
    return is_as_first(number // TRIAL_PASSES)


@torch.inference_mode()
def decoded(model: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int) -> list[Sample | None]:
    """Every pass of decode but the first prompt's; None: it still saw what the other setting left behind."""
    found: list[Sample | None] = []
    engine, number = model.promoe.runtime.engine, 0
    for position, prompt in enumerate(prompts):
        output = model(input_ids=prompt, use_cache=True)
        for _ in range(new_tokens):
            on = setting_of(number)
            engine.set_prefetch(on)
            before = engine.recorder.fetched_bytes("decode")
            token = output.logits[:, -1:].argmax(-1)
            start_s = time.perf_counter()
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            passed = Pass(time.perf_counter() - start_s, engine.recorder.fetched_bytes("decode") - before)
            changed = number > 0 and setting_of(max(0, number - SETTLING_PASSES)) is not on
            if position:
                found.append(None if changed else Sample(on, passed))
            number += 1
    return found


def rounds_of(passes: Sequence[Sample | None]) -> list[Round]:
    """Whole rounds."""
    whole = len(passes) // ROUND_PASSES * ROUND_PASSES
    return [[one for one in passes[start : start + ROUND_PASSES] if one] for start in range(0, whole, ROUND_PASSES)]


def split(rounds: Sequence[Round]) -> tuple[list[Pass], list[Pass]]:
    """With prefetch, and without."""
    samples = [sample for one in rounds for sample in one]
    return [sample.passed for sample in samples if sample.on], [sample.passed for sample in samples if not sample.on]


def as_they_are(with_prefetch: Sequence[Pass], without: Sequence[Pass]) -> float:
    return median(one.duration_s for one in without) - median(one.duration_s for one in with_prefetch)


def adjusted(with_prefetch: Sequence[Pass], without: Sequence[Pass]) -> float:
    return saved(with_prefetch, without)[0]


def scatter_ms(passes: Sequence[Pass], slope: float) -> float:
    """Once what the bytes account for is taken away."""
    return 1e3 * scatter(np.array([one.duration_s - slope * one.fetched_bytes for one in passes]))


def summary(rounds: Sequence[Round], resamples: int) -> dict[str, float | list[float]]:
    """All that is printed of one cache."""
    rng = np.random.default_rng(0)

    def drawn(count: int) -> list[Round]:
        return [rounds[idx] for idx in rng.integers(0, len(rounds), count)]

    with_prefetch, without = split(rounds)
    slope = seconds_per_byte([np.array(group).T for group in (with_prefetch, without)])
    found: dict[str, float | list[float]] = {
        "rounds": len(rounds),
        "with_ms": 1e3 * fmean(one.duration_s for one in with_prefetch),
        "without_ms": 1e3 * fmean(one.duration_s for one in without),
        "with_mb": 1e-6 * fmean(one.fetched_bytes for one in with_prefetch),
        "without_mb": 1e-6 * fmean(one.fetched_bytes for one in without),
        "scatter_ms": scatter_ms(without, 0.0),
        "scatter_adjusted_ms": scatter_ms(without, slope),
    }
    comparisons: dict[str, Comparison] = {"raw": as_they_are, "adjusted": adjusted}
    for name, compare in comparisons.items():
        of_all = [1e3 * compare(*split(drawn(len(rounds)))) for _ in range(resamples)]
        found[f"saved_{name}_ms"] = [
            1e3 * compare(with_prefetch, without),
            *np.quantile(of_all, [0.025, 0.975]).tolist(),
        ]
        found[f"on_{name}"] = [fmean(compare(*split(drawn(n))) > 0 for _ in range(resamples)) for n in ROUNDS]
    return found


def show(results: dict[str, dict[str, float | list[float]]]) -> str:
    head = ["", "ms", "", "MB", "", "scatter, ms", "", "saved, ms:", "", "on, % of tests of 1, 2, 4 rounds:", ""]
    under = ["", *["with", "without"] * 2, *["raw", "adjusted"] * 3]
    rows = []
    for cache, of_cache in results.items():
        numbers = [f"{of_cache[name]:.1f}" for name in PLAIN]
        for name in ("raw", "adjusted"):
            value, low, high = of_cache[f"saved_{name}_ms"]  # type: ignore[misc]
            numbers.append(f"{value:.1f} ({low:.1f} - {high:.1f})")
        for name in ("raw", "adjusted"):
            numbers.append(", ".join(f"{100 * share:.0f}" for share in of_cache[f"on_{name}"]))  # type: ignore[union-attr]
        rows.append([cache, *numbers])
    return "\n".join(aligned([head, under, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["25%", "50%", "75%"])
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--new-tokens", type=int, default=41)
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/governing.json"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    checkpoint, prompts = widened_demo(options.out, options.prompts + 1)
    prompts = [prompt[:, :MOST_PROMPT_TOKENS] for prompt in prompts]
    config = promoe.PromoeConfig(governor=False, bypass=False, read_mode="direct")
    results = {}
    for cache in options.caches:
        model = promoe.from_pretrained(checkpoint, cache=cache, config=config)
        passes = decoded(model, prompts, options.new_tokens)
        model.promoe.close()
        results[cache] = summary(rounds_of(passes), options.resamples)
    print(show(results))
    save(options.json, results)


if __name__ == "__main__":
    main()
