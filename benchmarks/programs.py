"""What new numbers of rows cost: for each that an expert is multiplied with for the first time, oneDNN makes a program.

    python benchmarks/programs.py [--tokens 1900] [--cache 50%] [--json promoe-out/benchmarks/programs.json]

1. The first product of 60, 63, ... 357 rows with one matrix of the widened demo model and of others, and the second one.
2. Prompts of random tokens, each read twice: by the unmodified widened demo model, and with its experts in slots, as they are
   in the checkpoint and, if `promoe pack` was run, packed. The second time all programs are there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from common import SHAPES, save, widened_demo

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.model.packed_files import FOLDER

PROMPTS, ROWS = 4, range(60, 360, 3)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def products(name: str, shape: tuple[int, int]) -> dict[str, object]:
    """Medians over numbers of rows, ms."""
    matrix = torch.randn(shape).to(torch.bfloat16)
    times: list[list[float]] = [[], []]
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).to(torch.bfloat16)
        out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16)
        for values in times:
            values.append(1e3 * seconds(partial(torch.mm, x, matrix.t(), out=out)))
    first, second = map(statistics.median, times)
    print(f"{name:>14} {shape[0]:>6} x {shape[1]:<5} first product {first:5.2f} ms, second {second:5.2f}")
    return {"model": name, "shape": shape, "first_ms": first, "second_ms": second}


def prompts(name: str, model: Any, num_tokens: int) -> dict[str, object]:
    """Seconds of each prompt, new and again."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(PROMPTS):
        ids = torch.randint(5, model.config.vocab_size, (1, num_tokens), generator=generator)
        with torch.inference_mode():
            found.append([seconds(partial(model, ids, logits_to_keep=1, use_cache=False)) for _ in range(2)])
    words = ", ".join(f"{new:.2f} ({again:.2f})" for new, again in found)
    print(f"{name:>14}, {num_tokens} tokens, s, new (again): {words}")
    return {"system": name, "tokens": num_tokens, "new_again_s": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--cache", default="50%")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/programs.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    table = [
        products(name, shape)
        for name, (hidden, intermediate) in SHAPES.items()
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    ]
    checkpoint, _ = widened_demo(Path("promoe-out"), 1)
    rows = [prompts("unmodified", load_stock(checkpoint, torch.bfloat16), options.tokens)]
    for name, packed in {"plain": None, "packed": checkpoint / FOLDER}.items():
        if packed is None or packed.is_dir():
            model = promoe.from_pretrained(checkpoint, cache=options.cache, packed=packed)
            rows.append(prompts(name, model, options.tokens))
            model.promoe.close()
    save(options.json, {"products": table, "prompts": rows})


if __name__ == "__main__":
    main()
