"""Small differences between settings: the same tokens, one at a time, under each setting in turn.

    python benchmarks/lockstep.py [begin_early=False lookahead=2,waste_share=0.1 ...] [--caches 12.5% 25% 50% 75%]
        [--predictor gate] [--prompts 5] [--new-tokens 40] [--json FILE]

Each argument is a setting: fields of `PromoeConfig` with commas between them. The demo model with experts of real size
is opened once per setting, its experts read past the page cache, prefetch always on. The default is always the first,
and is opened again as the last, for control: how far the control's ratio is from 1 says how large a difference has to
be to mean anything. The intervals do not say that, because they know of tokens only, and not of what makes one model in
memory faster than its twin.

All models decode the same held-out prompts: each token under one setting, then under the next, in changing order. Their
logits are compared at every token. What one setting prefetches may arrive while another computes; that favours all of
them alike.

Prints, per cache: milliseconds per token, of it waiting, the median of default / setting token by token (above 1 the
setting is faster) with its 95% bootstrap interval, and megabytes per token. Takes about five minutes on two cores, and
two more per setting.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from common import heldout_prompts, make_parser, open_slots, print_table, save, widened_demo
from transformers import PreTrainedModel

from promoe.commands.measure import paired_speedup

DEFAULT, CONTROL = "default", "default again"


def fields_of(setting: str) -> dict[str, Any]:
    """Return `lookahead=2,eviction=lru` as a dictionary; a value that is not a Python literal is text."""
    fields: dict[str, Any] = {}
    for field in () if setting in (DEFAULT, CONTROL) else setting.split(","):
        name, _, value = field.partition("=")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    return fields


@torch.inference_mode()
def decode(models: dict[str, PreTrainedModel], prompt: torch.Tensor, new_tokens: int) -> dict[str, list[float]]:
    """Return the seconds of each token after the first, by setting."""
    names = list(models)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    outputs = {name: model(prompt, use_cache=True) for name, model in models.items()}
    for number in range(new_tokens):
        logits = outputs[DEFAULT].logits
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
    """Return the figures of one cache by setting; the first prompt fills the slots and is not counted."""
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
        ratio, of_decode = paired_speedup(seconds[DEFAULT], seconds[name]), model.promoe.stats().decode
        results[name] = {
            "tpot_ms": 1e3 * median(seconds[name]),
            "tokens": len(seconds[name]),
            "speedup": [ratio.value, ratio.low, ratio.high],
            "stall_ms": 1e3 * of_decode.stall_s / len(seconds[name]),
            "mb_per_token": of_decode.bytes_per_token / 1e6,
        }
    return results


def show(cache: str, results: dict[str, Any]) -> None:
    rows = [(f"cache {cache}", "ms", "of it waiting (mean)", "default / this", "", "MB per token")]
    for name, one in results.items():
        value, low, high = one["speedup"]
        stall, nbytes = f"{one['stall_ms']:.1f}", f"{one['mb_per_token']:.0f}"
        rows.append((name, f"{one['tpot_ms']:.1f}", stall, f"{value:.3f}", f"{low:.3f} - {high:.3f}", nbytes))
    print_table(rows)


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--caches", nargs="+", default=["12.5%", "25%", "50%", "75%"])
    parser.add_argument("--predictor", default="gate", help="name or folder; none: no prefetch")
    parser.add_argument("--prompts", type=int, default=5, help="that are counted")
    parser.add_argument("--new-tokens", type=int, default=40)
    options = parser.parse_args()
    checkpoint, prompts = widened_demo(), heldout_prompts(options.prompts + 1)
    predictor = None if options.predictor == "none" else options.predictor
    results = {}
    for cache in options.caches:
        models = {
            name: open_slots(checkpoint, cache, predictor, **fields_of(name))
            for name in (DEFAULT, *options.settings, CONTROL)
        }
        results[cache] = compare(models, prompts, options.new_tokens)
        for model in models.values():
            model.promoe.close()
        show(cache, results[cache])
    save(options.json, results)


if __name__ == "__main__":
    main()
