"""Small differences between settings: the same tokens, one at a time, under each setting in turn.

    python benchmarks/lockstep.py [begin_early=False lookahead=2,waste_share=0.1 ...] [--caches 12.5% 25% 50% 75%]
        [--predictor gate] [--prompts 5] [--new-tokens 40] [--out promoe-out] [--json FILE]

Each argument is a setting, fields of `PromoeConfig` with commas between them; the default is always the first. The widened
demo model is opened once per setting, its experts read past the page cache, prefetch always on. The default is opened a second
time, as the last, for control: how far its ratio is from 1 says how large a difference has to be to mean anything. The
intervals do not say that: they know of tokens, not of what makes one model in memory faster than its twin. All decode the same
held-out prompts together: each token under one setting, then under the next, in changing order, so that whatever else happens
on the machine meets them alike. That all have the same logits is checked at every token. Printed per cache: medians, the median
of the ratios token by token (default / setting: above 1 the setting is faster) with its 95% bootstrap interval, and bytes.

What one setting prefetches may arrive while another computes; that favours all of them, and none.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import save, widened_demo
from transformers import PreTrainedModel

import promoe
from promoe.commands.measure import paired_speedup
from promoe.units import aligned

DEFAULT, CONTROL = "default", "default again"


def fields_of(setting: str) -> dict[str, Any]:
    """`lookahead=2,eviction=lru` as a dictionary; what is no Python literal is text."""
    fields: dict[str, Any] = {}
    for field in setting.split(","):
        name, _, value = field.partition("=")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    return fields


def opened(checkpoint: Path, cache: str, predictor: str | None, setting: str) -> PreTrainedModel:
    """The model under a setting."""
    fields = {} if setting in (DEFAULT, CONTROL) else fields_of(setting)
    base = promoe.PromoeConfig(governor=False, bypass=False, read_mode="direct")
    config = dataclasses.replace(base, **fields)
    return promoe.from_pretrained(checkpoint, cache=cache, predictor=predictor, config=config)


@torch.inference_mode()
def decode(models: dict[str, PreTrainedModel], prompt: torch.Tensor, new_tokens: int) -> dict[str, list[float]]:
    """Seconds of each token after the first, by setting."""
    names = list(models)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    outputs = {name: model(prompt, use_cache=True) for name, model in models.items()}
    for number in range(new_tokens):
        logits = outputs[names[0]].logits
        different = [name for name in names if not torch.equal(outputs[name].logits, logits)]
        assert not different, f"other logits under {different}"
        token = logits[:, -1:].argmax(-1)
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        for name in order if number // len(names) % 2 else reversed(order):
            start_s = time.perf_counter()
            outputs[name] = models[name](token, past_key_values=outputs[name].past_key_values, use_cache=True)
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def compare(models: dict[str, PreTrainedModel], prompts: Sequence[torch.Tensor], new_tokens: int) -> dict[str, Any]:
    """What is printed of one cache; the first prompt fills the slots."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number, prompt in enumerate(prompts):
        found = decode(models, prompt, new_tokens)
        for name, model in models.items():
            if number:
                seconds[name] += found[name]
            else:
                model.promoe.reset_stats()
    results = {}
    for name, model in models.items():
        ratio = paired_speedup(seconds[DEFAULT], seconds[name])
        results[name] = {
            "tpot_ms": 1e3 * median(seconds[name]),
            "tokens": len(seconds[name]),
            "speedup": [ratio.value, ratio.low, ratio.high],
            "stall_ms": 1e3 * model.promoe.stats().decode.stall_s / len(seconds[name]),
            "mb_per_token": model.promoe.stats().decode.bytes_per_token / 1e6,
        }
    return results


def show(cache: str, results: dict[str, Any]) -> None:
    """As a table."""
    rows = [(f"cache {cache}", "ms", "of it waiting (mean)", "default / this", "", "MB per token")]
    for name, one in results.items():
        value, low, high = one["speedup"]
        stall, nbytes = f"{one['stall_ms']:.1f}", f"{one['mb_per_token']:.0f}"
        rows.append((name, f"{one['tpot_ms']:.1f}", stall, f"{value:.3f}", f"{low:.3f} - {high:.3f}", nbytes))
    print("\n".join(aligned(rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--caches", nargs="+", default=["12.5%", "25%", "50%", "75%"])
    parser.add_argument("--predictor", default="gate", help="name or folder; none: no prefetch")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/lockstep.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    checkpoint, prompts = widened_demo(options.out, options.prompts + 1)
    predictor = None if options.predictor == "none" else options.predictor
    names = [DEFAULT, *options.settings, CONTROL]
    results = {}
    for cache in options.caches:
        models = {name: opened(checkpoint, cache, predictor, name) for name in names}
        results[cache] = compare(models, prompts, options.new_tokens)
        for model in models.values():
            model.promoe.close()
        show(cache, results[cache])
    save(options.json, results)


if __name__ == "__main__":
    main()
