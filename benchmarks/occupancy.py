"""What the processor and the readers do during a token of decode, and what they cost each other.

    python benchmarks/occupancy.py [--caches 12.5% 25% 50% 75% 100%] [--predictors gate] [--pairs 4] [--new-tokens 24]
        [--out promoe-out] [--json promoe-out/benchmarks/occupancy.json]

The widened demo model, its experts read past the page cache; from timelines. All caches answer the same
held-out prompts, taking turns. Printed per cache and predictor:

1. Milliseconds per token: computing experts, all else, waiting (means: these add up to the token).
2. How much of a token all readers are busy, some, or none, and at what rate bytes arrive while some are.
3. Medians of computing one layer's experts, and of what lies between two layers' experts (attention, norms, the gate, the
   hint), where nothing was being read, and where all readers were busy throughout. Their ratio is what reading costs.

If readers are busy nearly all the time, only fewer bytes help; if the sum of computing alone exceeds `everything resident`,
no prefetch can bring it back.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
import transformers
from common import WIDTH, save
from transformers import AutoTokenizer, PreTrainedModel

import promoe
from promoe.commands.bench.example import find_example, read_prompts
from promoe.commands.measure import generate
from promoe.stats.lanes import Lanes, Transfer, lanes_of
from promoe.units import aligned

QUIET, BUSY = 0.02, 0.98  # shares of a stretch of time in which all readers are busy: as good as none, as good as all


class Stretch(NamedTuple):
    """Computing of one layer, without waiting."""

    seconds: float
    busy: float
    """Share of it, and of the waiting in its midst, in which each reader was busy, on average."""


def overlap_s(transfers: Iterable[Transfer], start_s: float, end_s: float) -> float:
    """Seconds of all transfers together within a stretch of time."""
    return sum(max(0.0, min(end_s, one.end_s) - max(start_s, one.start_s)) for one in transfers)


def busy_s(transfers: Sequence[Transfer], readers: int) -> list[float]:
    """Seconds in which exactly 1, 2, .. `readers` transfers were under way."""
    seconds = [0.0] * (readers + 1)
    events = sorted([(one.start_s, 1) for one in transfers] + [(one.end_s, -1) for one in transfers])
    running = 0
    for (start_s, change), (end_s, _) in pairwise(events):
        running += change
        seconds[min(running, readers)] += end_s - start_s
    return seconds[1:]


def stretches(one: Lanes, readers: int) -> tuple[list[Stretch], list[Stretch]]:
    """Of a pass: computing each layer's experts; and what lies before each but the first."""
    experts, between = [], []
    before_s: float | None = None
    for visit in one.visits:
        waited_s = sum(wait.duration_s for wait in one.waits if visit.start_s <= wait.start_s < visit.end_s)
        busy = overlap_s(one.transfers, visit.start_s, visit.end_s) / (visit.duration_s * readers)
        experts.append(Stretch(visit.duration_s - waited_s, busy))
        if before_s is not None:
            gap_s = visit.start_s - before_s
            between.append(Stretch(gap_s, overlap_s(one.transfers, before_s, visit.start_s) / (gap_s * readers)))
        before_s = visit.end_s
    return experts, between


def middle_ms(found: Iterable[Stretch]) -> float | None:
    """Median milliseconds; None of nothing."""
    times = [1e3 * one.seconds for one in found]
    return median(times) if times else None


def summary(passes: Sequence[Lanes], bytes_per_token: float, readers: int) -> dict[str, float | None]:
    """All that is printed of one cache and predictor, by column."""
    each = [busy_s(one.transfers, readers) for one in passes]
    any_s = fmean(sum(seconds) for seconds in each)
    token_s = fmean(one.duration_s for one in passes)
    parts = [stretches(one, readers) for one in passes]
    experts = [one for of_pass, _ in parts for one in of_pass]
    between = [one for _, of_pass in parts for one in of_pass]
    return {
        "token_ms": 1e3 * token_s,
        "experts_ms": 1e3 * fmean(one.experts_s for one in passes),
        "else_ms": 1e3 * fmean(one.rest_s for one in passes),
        "waiting_ms": 1e3 * fmean(one.stall_s for one in passes),
        "all_busy_percent": 100 * fmean(seconds[-1] for seconds in each) / token_s,
        "none_busy_percent": 100 * (1 - any_s / token_s),
        "mb_per_token": bytes_per_token / 1e6,
        "gb_per_s": bytes_per_token / any_s / 1e9 if any_s else None,
        "experts_alone_ms": middle_ms(one for one in experts if one.busy <= QUIET),
        "experts_beside_ms": middle_ms(one for one in experts if one.busy >= BUSY),
        "between_alone_ms": middle_ms(one for one in between if one.busy <= QUIET),
        "between_beside_ms": middle_ms(one for one in between if one.busy >= BUSY),
    }


def record(
    models: dict[str, PreTrainedModel], prompts: Sequence[dict[str, torch.Tensor]], new_tokens: int
) -> dict[str, list[Lanes]]:
    """The decode passes of every model; the first prompt fills the slots."""
    passes: dict[str, list[Lanes]] = {name: [] for name in models}
    with tempfile.TemporaryDirectory() as folder:
        for number, prompt in enumerate(prompts):
            for name, model in models.items():
                with model.promoe.trace(Path(folder) / "timeline.json") as tracer:
                    generate(model, prompt, new_tokens, min_new_tokens=new_tokens, pad_token_id=0)
                if number:
                    passes[name] += [one for one in lanes_of(tracer.spans()) if one.phase == "decode"]
                else:
                    model.promoe.reset_stats()
    return passes


# A column's heading in two lines, and its digits.
COLUMNS = {
    "token_ms": ("token", "ms", 0),
    "experts_ms": ("experts", "ms", 0),
    "else_ms": ("else", "ms", 0),
    "waiting_ms": ("waiting", "ms", 0),
    "all_busy_percent": ("readers:", "all, %", 0),
    "none_busy_percent": ("", "none, %", 0),
    "mb_per_token": ("MB per", "token", 0),
    "gb_per_s": ("GB/s", "", 2),
    "experts_alone_ms": ("experts:", "alone, ms", 2),
    "experts_beside_ms": ("", "beside", 2),
    "between_alone_ms": ("between:", "alone, ms", 2),
    "between_beside_ms": ("", "beside", 2),
}


def show(results: dict[str, dict[str, float | None]]) -> None:
    """As a table."""
    rows = [("", *(head for head, _, _ in COLUMNS.values())), ("", *(unit for _, unit, _ in COLUMNS.values()))]
    for name, one in results.items():
        cells = (("–" if one[key] is None else f"{one[key]:.{digits}f}") for key, (_, _, digits) in COLUMNS.items())
        rows.append((name, *cells))
    print("\n".join(aligned(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["12.5%", "25%", "50%", "75%", "100%"])
    parser.add_argument("--predictors", nargs="+", default=["gate"], help="names or folders; none: no prefetch")
    parser.add_argument("--pairs", type=int, default=4, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/occupancy.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    example = find_example()
    checkpoint = example.widened(options.out, WIDTH, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = read_prompts(example.prompts_file, options.pairs + 1, "Ask for fewer --pairs.")
    prompts = [dict(tokenizer(text, return_tensors="pt")) for text in texts[: options.pairs + 1]]
    models = {
        f"{cache} {predictor}": promoe.from_pretrained(
            checkpoint,
            cache=cache,
            predictor=None if predictor == "none" else predictor,
            # Prefetch stays on, so that what is shown is one thing; with everything in slots the same code runs.
            config=promoe.PromoeConfig(governor=False, bypass=False, read_mode="direct"),
        )
        for cache in options.caches
        for predictor in options.predictors
    }
    passes = record(models, prompts, options.new_tokens)
    results = {}
    for name, model in models.items():
        readers = model.promoe.runtime.engine.link.workers
        results[name] = summary(passes[name], model.promoe.stats().decode.bytes_per_token, readers)
        model.promoe.close()
    show(results)
    save(options.json, results)


if __name__ == "__main__":
    main()
