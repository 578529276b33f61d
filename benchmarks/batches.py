"""Many prompts at once from a quarter of the experts: generated tokens per second of prompts and answers together.

    python benchmarks/batches.py [--cache 25%] [--prompts 64] [--max-new-tokens 32] [--forms exact fast int8]
        [--json FILE]

Prints a row for each way to answer. The same model and slots answer the same held-out ShareGPT prompts one by one, in padded
batches of several sizes, and by `promoe.generate_batch` with several numbers of sequences at once; this also with
kernels="fast" and with int8 experts, beside what `promoe plan --batch` expects of these sizes. One by one answers a quarter
of them. Each answer has the same length. Uses the widened demo model. Takes 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import DTYPE, heldout_prompts, in_form, make_parser, widened_demo
from transformers import PreTrainedModel

import promoe
from promoe.commands.plan.many_prompts import plan_batch
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.sizes import Room
from promoe.commands.plan.throughput import BatchWork, Setting, Wanted
from promoe.units import aligned, format_number, format_percent

FORMS = ("exact", "fast", "int8")
PADDED, AT_ONCE = (8, 32), (8, 16, 32, 64)
KV_TOKENS, STEP_TOKENS = 32768, 512
HELDOUT = 24  # prompts that the demo model was not trained on
LONGEST = 256  # tokens of a prompt; longer ones are cut

Way = tuple[Callable[..., None], int]  # what answers prompts, and how many it answers


def different_prompts(count: int) -> list[list[int]]:
    """Return the held-out prompts, and where there are too few, also without their first 16 tokens, 32, and so on."""
    ids = [one[0].tolist() for one in heldout_prompts(HELDOUT)]
    found = (one[start : start + LONGEST] for start in range(0, 10**4, 16) for one in ids if len(one) > start + 16)
    return list(islice(found, count))


def alone(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Answer prompts one by one."""
    for ids in prompts:
        padded(model, [ids], new_tokens)


def padded(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Answer prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)


def padded_batches(size: int) -> Callable[..., None]:
    """Return what answers prompts in batches of this size."""

    def run(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
        for start in range(0, len(prompts), size):
            padded(model, prompts[start : start + size], new_tokens)

    return run


def at_once(size: int) -> Callable[..., None]:
    """Return what answers prompts with so many sequences at once."""

    def run(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
        asked = [promoe.BatchPrompt(ids, new_tokens) for ids in prompts]
        answers = list(promoe.generate_batch(model, asked, at_once=size, step_tokens=STEP_TOKENS, kv_tokens=KV_TOKENS))
        assert all(len(answer.tokens) == new_tokens for answer in answers), answers

    return run


def measured(
    run: Callable[..., None], model: PreTrainedModel, prompts: Sequence[list[int]], new: int
) -> dict[str, Any]:
    """Return what one way to answer took."""
    model.promoe.reset_stats()
    start_s = time.perf_counter()
    run(model, prompts, new)
    took_s, total = time.perf_counter() - start_s, model.promoe.stats().total
    count = len(prompts) * new
    return {
        "tokens_per_s": count / took_s,
        "mb_per_token": total.bytes_total / count / 1e6,
        "waiting": total.stall_s / took_s,
    }


def expectation(
    checkpoint: Path, experts: str, kernels: str, prompts: Sequence[list[int]], options: argparse.Namespace
) -> Callable[[int], float]:
    """Measure the machine as a plan does, and return what it expects: sequences at once -> tokens per second."""
    new_tokens, total = options.max_new_tokens, sum(map(len, prompts))
    work = BatchWork(len(prompts), total / len(prompts), new_tokens, max(map(len, prompts)) + new_tokens)
    read = read_model(str(checkpoint), experts=experts)
    rate = Room("RAM", None, 0, None).rate_of(options.cache, read.sizes)
    assert read.store is not None
    with closing(read.store):
        model = plan_batch(read, work, None, Wanted()).model

    def at(number: int) -> float:
        return model.expected(Setting(number, STEP_TOKENS, KV_TOKENS, rate, kernels)).tokens_per_s

    return at


def rows_of(
    form: str, ways: dict[str, Way], prompts: Sequence[list[int]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Open the model in a form, and yield what each way to answer took."""
    config = promoe.PromoeConfig(kernels="fast" if form == "fast" else "exact")
    experts, checkpoint = "auto", widened_demo()
    if form == "int8":
        experts = form
        in_form(checkpoint, form)
    expected_at = expectation(checkpoint, experts, config.kernels, prompts, options)
    model = promoe.from_pretrained(checkpoint, cache=options.cache, experts=experts, dtype=DTYPE, config=config)
    model.generation_config.eos_token_id = None  # so that all answers have the same length
    try:
        padded(model, prompts[:1], 4)
        for name, (run, count) in ways.items():
            row = {"form": form, "way": name, **measured(run, model, prompts[:count], options.max_new_tokens)}
            if name.startswith("generate_batch"):
                row["expected"] = expected_at(int(name.split()[-1]))
            yield row
    finally:
        model.promoe.close()


def main(arguments: Sequence[str]) -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--cache", default="25%", help="slots (default: 25%%)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="of the experts and products")
    parser.add_argument("--prompts", type=int, default=64, help="how many (default: 64)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of each answer (default: 32)")
    options = parser.parse_args(arguments)
    prompts = different_prompts(options.prompts)
    together: dict[str, Way] = {f"generate_batch, {size}": (at_once(size), len(prompts)) for size in AT_ONCE}
    ways: dict[str, Way] = {"one by one": (alone, max(1, len(prompts) // 4))}
    ways |= {f"padded, {size}": (padded_batches(size), len(prompts)) for size in PADDED}
    rows = []
    for number, form in enumerate(options.forms):
        for row in rows_of(form, together if number else ways | together, prompts, options):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"arguments": list(arguments), "rows": rows}, indent=1))
    first = rows[0]["tokens_per_s"]
    table = [["experts", "answered", "tokens/s", "planned", "x one by one", "MB/token", "waiting, %"]]
    for row in rows:
        speed = row["tokens_per_s"]
        planned = format_number(row["expected"]) if "expected" in row else ""
        rate = [format_number(speed), planned, format_number(speed / first), format_number(row["mb_per_token"])]
        table.append([row["form"], row["way"], *rate, format_percent(row["waiting"])])
    print("\n".join(aligned(table)))


if __name__ == "__main__":
    main(sys.argv[1:])
