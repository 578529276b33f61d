"""What `model.promoe.warm` is worth to a new model's first prompt.

    python benchmarks/warming.py [--caches 12.5% 25% 50% 75%] [--prompts 8] [--out promoe-out]
        [--json promoe-out/benchmarks/warming.json]

The widened demo model, its experts read past the page cache. What its experts are used for is counted in answers to other
prompts than those that are measured. Each of these is then the first one of models that are opened anew: one whose slots are
empty, and one that was warmed, in changing order. Printed per cache: medians of TTFT, the median of the ratios per prompt
(cold / warm) with its 95% bootstrap interval, bytes that were moved for the prompt, and how long warming took.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from common import save, widened_demo

import promoe
from promoe.commands.measure import generate, paired_speedup
from promoe.units import aligned

COUNTED_PROMPTS, COUNTED_TOKENS = 6, 24
Figures = dict[str, list[float]]


def first_prompt(checkpoint: Path, cache: str, prompt: torch.Tensor, before: promoe.Stats | None) -> dict[str, float]:
    """What a new model takes for it."""
    config = promoe.PromoeConfig(read_mode="direct", bypass=False)
    model = promoe.from_pretrained(checkpoint, cache=cache, config=config)
    started_s = time.perf_counter()
    if before is not None:
        model.promoe.warm(before)
    warmed_s = time.perf_counter() - started_s
    model.promoe.reset_stats()
    found = generate(model, {"input_ids": prompt}, 1)
    moved = model.promoe.stats().total.bytes_total
    model.promoe.close()
    return {"ttft_s": found.ttft_s, "moved_mb": moved / 1e6, "warmed_s": warmed_s}


def counted(checkpoint: Path, prompts: list[torch.Tensor]) -> promoe.Stats:
    """What answers to some prompts used."""
    model = promoe.from_pretrained(checkpoint, cache="50%", config=promoe.PromoeConfig(bypass=False))
    for prompt in prompts:
        generate(model, {"input_ids": prompt}, COUNTED_TOKENS)
    stats = model.promoe.stats()
    model.promoe.close()
    return stats


def compare(checkpoint: Path, cache: str, before: promoe.Stats, prompts: list[torch.Tensor]) -> dict[str, Figures]:
    """Of one cache: each figure by prompt, cold and warm."""
    found: dict[str, Figures] = {"cold": {}, "warm": {}}
    for number, prompt in enumerate(prompts):
        for kind in ("cold", "warm") if number % 2 else ("warm", "cold"):
            one = first_prompt(checkpoint, cache, prompt, before if kind == "warm" else None)
            for name, value in one.items():
                found[kind].setdefault(name, []).append(value)
    return found


def row(cache: str, cold: Figures, warm: Figures) -> tuple[str, ...]:
    """Of the table."""
    ratio = paired_speedup(cold["ttft_s"], warm["ttft_s"])
    return (
        cache,
        f"{1e3 * median(cold['ttft_s']):.0f}, {1e3 * median(warm['ttft_s']):.0f}",
        f"{ratio.value:.2f} ({ratio.low:.2f} - {ratio.high:.2f})",
        f"{median(cold['moved_mb']):.0f}, {median(warm['moved_mb']):.0f}",
        f"{median(warm['warmed_s']):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["12.5%", "25%", "50%", "75%"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/warming.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    checkpoint, prompts = widened_demo(options.out, COUNTED_PROMPTS + options.prompts)
    before = counted(checkpoint, prompts[:COUNTED_PROMPTS])
    header = ("cache", "TTFT, ms: cold, warm", "cold / warm", "MB moved: cold, warm", "warming, s")
    rows, results = [header], {}
    for cache in options.caches:
        results[cache] = compare(checkpoint, cache, before, prompts[COUNTED_PROMPTS:])
        rows.append(row(cache, **results[cache]))
    print("\n".join(aligned(rows)))
    save(options.json, results)


if __name__ == "__main__":
    main()
