"""What `model.promoe.warm` is worth to a new model's first answer.

    python benchmarks/warming.py [--caches 12.5% 25% 50% 75%] [--prompts 5] [--new-tokens 24] [--out promoe-out]
        [--json promoe-out/benchmarks/warming.json]

The widened demo model, its experts read past the page cache. What its experts are used for is counted in answers to other
prompts than those that are measured. Each of these is then the first one of models that are opened anew: one whose slots are
empty, and one that was warmed, in changing order. Printed per cache: medians of TTFT and TPOT, the median of the ratios per
prompt (cold / warm) with its 95% bootstrap interval, bytes moved from the prompt on, and how long warming took. Warming pays
where it happens while nobody waits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

import promoe
from promoe.demo.example import find_example
from promoe.measure import generate, paired_speedup
from promoe.units import aligned

WIDTH = 128
COUNTED_PROMPTS = 6


def answer(
    checkpoint: Path, cache: str, prompt: torch.Tensor, new_tokens: int, before: promoe.Stats | None
) -> dict[str, float]:
    """A new model's first answer."""
    config = promoe.PromoeConfig(read_mode="direct", bypass=False)
    model = promoe.from_pretrained(checkpoint, cache=cache, config=config)
    started_s = time.perf_counter()
    if before is not None:
        model.promoe.warm(before)
    warmed_s = time.perf_counter() - started_s
    model.promoe.reset_stats()
    found = generate(model, {"input_ids": prompt}, new_tokens)
    stats = model.promoe.stats()
    model.promoe.close()
    moved = stats.total.bytes_total
    return {"ttft_s": found.ttft_s, "tpot_s": found.tpot_s, "moved_mb": moved / 1e6, "warmed_s": warmed_s}


def counted(checkpoint: Path, cache: str, prompts: list[torch.Tensor], new_tokens: int) -> promoe.Stats:
    """What answers to some prompts used."""
    model = promoe.from_pretrained(checkpoint, cache=cache, config=promoe.PromoeConfig(bypass=False))
    for prompt in prompts:
        generate(model, {"input_ids": prompt}, new_tokens)
    stats = model.promoe.stats()
    model.promoe.close()
    return stats


def compare(checkpoint: Path, cache: str, before: promoe.Stats, prompts: list[torch.Tensor], new_tokens: int) -> Any:
    """Of one cache: figures by prompt, cold and warm."""
    cold, warm = [], []
    for number, prompt in enumerate(prompts):
        for is_warm in (False, True) if number % 2 else (True, False):
            found = answer(checkpoint, cache, prompt, new_tokens, before if is_warm else None)
            (warm if is_warm else cold).append(found)
    return {"cold": cold, "warm": warm}


def row(cache: str, found: dict[str, list[dict[str, float]]]) -> tuple[str, ...]:
    """Of the table."""
    cells = [cache]
    for name in ("ttft_s", "tpot_s"):
        cold, warm = ([one[name] for one in found[kind]] for kind in ("cold", "warm"))
        ratio = paired_speedup(cold, warm)
        cells += [f"{1e3 * median(cold):.0f}, {1e3 * median(warm):.0f}"]
        cells += [f"{ratio.value:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"]
    moved = [median(one["moved_mb"] for one in found[kind]) for kind in ("cold", "warm")]
    return (*cells, f"{moved[0]:.0f}, {moved[1]:.0f}", f"{median(one['warmed_s'] for one in found['warm']):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["12.5%", "25%", "50%", "75%"])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/warming.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    example = find_example()
    checkpoint = example.widened(options.out, WIDTH, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = example.prompts(COUNTED_PROMPTS + options.prompts)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    before = counted(checkpoint, "50%", prompts[:COUNTED_PROMPTS], options.new_tokens)
    header = ("cache", "TTFT, ms: cold, warm", "cold / warm", "TPOT, ms", "cold / warm", "MB moved", "warming, s")
    rows, results = [header], {}
    for cache in options.caches:
        results[cache] = compare(checkpoint, cache, before, prompts[COUNTED_PROMPTS:], options.new_tokens)
        rows.append(row(cache, results[cache]))
    print("\n".join(aligned(rows)))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
