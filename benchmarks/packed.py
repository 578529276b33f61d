"""What packed experts (`promoe pack`) gain: one product, then whole models.

    python benchmarks/packed.py [--cache 25% 50% 75% 100%] [--prompts 5] [--tokens 24] [--json FILE]

Prints:

1. Microseconds of one token times one expert's matrix, of the shapes of some models: `torch.mm` over the model's
   layout, the packed layout, and what reading the bytes alone takes (`sum`), the physical bound. 24 experts one after
   the other, so that no cache holds them.
2. Milliseconds to the first token and per token of the demo model with experts of real size: unmodified, patched
   without and with packed experts, in turn at each held-out prompt, with the ratios and their 95% bootstrap intervals.
   Logits are compared bit by bit.

The first prompt fills slots and compares products, and is not counted. Files are read as `read_mode="auto"` chooses.
The models are open at once, and memory is not limited. Takes about five minutes on two cores, and one more to pack the
experts the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import DTYPE, heldout_prompts, make_parser, save, widened_demo

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.commands.measure import estimate, paired_speedup
from promoe.experts.kernels.packed import PackedMatrix, Packing
from promoe.model.opening import open_headers
from promoe.model.packing import PACKED, write_packed
from promoe.model.slot_folders import default_folder
from promoe.model.slot_index import INDEX

# Hidden and intermediate size.
SHAPES = {"demo x128": (192, 9216), "Qwen3-30B-A3B": (2048, 768), "gpt-oss-20b": (2880, 2880)}
EXPERTS, ROUNDS = 24, 9


def seconds(run: Callable[[Any], object], operands: Sequence[Any]) -> float:
    """Return the seconds per operand."""
    start_s = time.perf_counter()
    for operand in operands:
        run(operand)
    return (time.perf_counter() - start_s) / len(operands)


def interleaved(plain: list[torch.Tensor], packed: list[PackedMatrix]) -> dict[str, list[float]]:
    """Return the seconds per matrix in each round but the first, in which packed products are compared."""
    out_size, in_size = plain[0].shape
    x, out = torch.randn(1, in_size).to(DTYPE), torch.empty(1, out_size, dtype=DTYPE)
    times: dict[str, list[float]] = {"plain": [], "packed": [], "bytes": []}
    for _ in range(ROUNDS + 1):
        times["plain"].append(seconds(lambda matrix: torch.mm(x, matrix.t(), out=out), plain))
        times["packed"].append(seconds(lambda matrix: matrix.multiply(x, out), packed))
        times["bytes"].append(seconds(lambda matrix: matrix.view(torch.int64).sum(), plain))
    return {name: values[1:] for name, values in times.items()}


def products(name: str, hidden: int, intermediate: int) -> list[dict[str, object]]:
    """Print the times of both matrices of an expert; a matrix that cannot be packed is left out."""
    rows: list[dict[str, object]] = []
    for which, shape in (("first", (2 * intermediate, hidden)), ("second", (hidden, intermediate))):
        packing = Packing.of(shape, False, DTYPE)
        if packing is None:
            continue
        plain = [torch.randn(shape).to(DTYPE) for _ in range(EXPERTS)]
        times = interleaved(plain, [packing.view(packing.pack(matrix)) for matrix in plain])
        us = {kind: 1e6 * estimate(values).value for kind, values in times.items()}
        gain = paired_speedup(times["plain"], times["packed"])
        print(
            f"{name:>14} {which:>6}: plain {us['plain']:6.0f} us, packed {us['packed']:6.0f}, bytes alone {us['bytes']:6.0f}; "
            f"{gain.value:.2f} ({gain.low:.2f} - {gain.high:.2f}) times as fast",
            flush=True,
        )
        rows.append({"model": name, "matrix": which, "shape": shape, "gain": gain.value, **us})
    return rows


@torch.inference_mode()
def answer(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float, list[torch.Tensor]]:
    """Return the seconds to the first token, the median seconds per token, and all logits."""
    logits, gaps_s, cache = [], [], None
    for _ in range(new_tokens):
        start_s = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        gaps_s.append(time.perf_counter() - start_s)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        logits.append(out.logits)
    return gaps_s[0], estimate(gaps_s[1:]).value, logits


def models(
    checkpoint: Path, stock: Any, cache: str, prompts: Sequence[torch.Tensor], new_tokens: int
) -> list[dict[str, object]]:
    """Print the times of the three models at one cache size."""
    opened = {
        "unmodified": stock,
        "plain": promoe.from_pretrained(checkpoint, cache=cache, experts="checkpoint"),
        "packed": promoe.from_pretrained(checkpoint, cache=cache, experts=PACKED),
    }
    times: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in opened} for phase in ("TTFT", "TPOT")}
    for number, ids in enumerate(prompts):
        expected = None
        for name, model in opened.items():
            *found_s, logits = answer(model, ids, new_tokens)
            expected = logits if expected is None else expected
            if not all(map(torch.equal, logits, expected)):
                raise SystemExit(f"{name}, cache {cache}, prompt {number}: other logits than the unmodified model's")
            for phase, duration_s in zip(times, found_s, strict=True):
                times[phase][name] += [duration_s] if number else []
    for name in ("plain", "packed"):
        opened[name].promoe.close()
    rows: list[dict[str, object]] = []
    for phase, by_name in times.items():
        ms = {name: 1e3 * estimate(values).value for name, values in by_name.items()}
        over = {name: paired_speedup(by_name[name], by_name["packed"]) for name in ("unmodified", "plain")}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in ms.items())
        ratios = ", ".join(f"{name} / packed {e.value:.2f} ({e.low:.2f} - {e.high:.2f})" for name, e in over.items())
        print(f"{cache:>6} {phase}, ms: {shown}; {ratios}", flush=True)
        gains = {f"{name}_over_packed": ratio.value for name, ratio in over.items()}
        rows.append({"cache": cache, "phase": phase, **ms, **gains})
    return rows


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--cache", nargs="+", default=["25%", "50%", "75%", "100%"])
    parser.add_argument("--prompts", type=int, default=5, help="that are counted")
    parser.add_argument("--tokens", type=int, default=24, help="per answer")
    options = parser.parse_args()
    of_products = [row for name, sizes in SHAPES.items() for row in products(name, *sizes)]
    checkpoint = widened_demo()
    if not (checkpoint / f"promoe-{PACKED}" / INDEX).is_file():
        opened = open_headers(checkpoint)
        write_packed(opened.layers, opened.store, default_folder(opened.store, PACKED))
        opened.store.close()
    prompts, stock = heldout_prompts(options.prompts + 1), load_stock(checkpoint, DTYPE)
    of_models = [row for cache in options.cache for row in models(checkpoint, stock, cache, prompts, options.tokens)]
    save(options.json, {"threads": torch.get_num_threads(), "products": of_products, "models": of_models})


if __name__ == "__main__":
    main()
