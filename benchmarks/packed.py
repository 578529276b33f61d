"""What packed experts (`promoe pack`) gain: one product, then whole models.

    python benchmarks/packed.py [--cache 25% 50% 75% 100%] [--json promoe-out/benchmarks/packed.json]

1. One token times one expert's matrices, of the shapes of some models: `torch.mm` over the model's layout and the packed
   one, 24 experts one after the other, so that no cache holds them; and what reading the bytes alone takes (`sum`), the
   physical bound.
2. The widened demo model (experts 128 times as wide): unmodified, patched without and with packed experts, in turn at each
   held-out prompt; logits are compared bit by bit. The first prompt, which fills slots and compares products, is not
   counted. Files are read as `read_mode="auto"` chooses. The models are open at once, and memory is not limited.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from common import SHAPES, save

import promoe
from promoe.commands.bench.example import find_example
from promoe.commands.bench.stock import load_stock
from promoe.commands.measure import estimate, paired_speedup
from promoe.experts.kernels.packed import PackedMatrix, Packing
from promoe.model.opening import open_headers
from promoe.model.packed_files import FOLDER, INDEX, packed_folder, write_packed

EXPERTS, ROUNDS, REPEAT = 24, 9, 128


def seconds(run: Callable[[Any], object], operands: list[Any]) -> float:
    start = time.perf_counter()
    for operand in operands:
        run(operand)
    return (time.perf_counter() - start) / len(operands)


def interleaved(plain: list[torch.Tensor], packed: list[PackedMatrix]) -> dict[str, list[float]]:
    """Seconds per matrix and round; the first round compares."""
    out_size, in_size = plain[0].shape
    x, out = torch.randn(1, in_size).to(torch.bfloat16), torch.empty(1, out_size, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"plain": [], "packed": [], "bytes": []}
    for _ in range(ROUNDS + 1):
        times["plain"].append(seconds(lambda matrix: torch.mm(x, matrix.t(), out=out), plain))
        times["packed"].append(seconds(lambda matrix: matrix.multiply(x, out), packed))
        times["bytes"].append(seconds(lambda matrix: matrix.view(torch.int64).sum(), plain))
    return times


def one_product(name: str, hidden: int, intermediate: int) -> list[dict[str, object]]:
    """Both matrices of an expert, of one family's sizes."""
    rows: list[dict[str, object]] = []
    for which, shape in (("first", (2 * intermediate, hidden)), ("second", (hidden, intermediate))):
        packing = Packing.of(shape, False, torch.bfloat16)
        if packing is None:
            continue
        plain = [torch.randn(shape).to(torch.bfloat16) for _ in range(EXPERTS)]
        packed = [packing.view(packing.pack(matrix)) for matrix in plain]
        times = interleaved(plain, packed)
        us = {kind: 1e6 * estimate(values[1:]).value for kind, values in times.items()}
        gain = paired_speedup(times["plain"][1:], times["packed"][1:])
        print(
            f"{name:>14} {which:>6}: plain {us['plain']:6.0f} us, packed {us['packed']:6.0f}, bytes alone {us['bytes']:6.0f}; "
            f"{gain.value:.2f} ({gain.low:.2f} - {gain.high:.2f}) times as fast"
        )
        rows.append({"model": name, "matrix": which, **us, "gain": gain.value})
    return rows


def answer(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float, list[torch.Tensor]]:
    """Seconds to the first token, median per token, and all logits."""
    logits, gaps_s, cache = [], [], None
    with torch.inference_mode():
        for _ in range(new_tokens):
            start = time.perf_counter()
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            gaps_s.append(time.perf_counter() - start)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits)
    return gaps_s[0], estimate(gaps_s[1:]).value, logits


def models(
    checkpoint: Path, caches: list[str], prompts: list[torch.Tensor], new_tokens: int
) -> list[dict[str, object]]:
    """The three, for each cache size."""
    rows: list[dict[str, object]] = []
    unmodified = load_stock(checkpoint, torch.bfloat16)
    for cache in caches:
        opened = {
            "unmodified": unmodified,
            "plain": promoe.from_pretrained(checkpoint, cache=cache, packed=None),
            "packed": promoe.from_pretrained(checkpoint, cache=cache, packed=checkpoint / FOLDER),
        }
        ttfts_s: dict[str, list[float]] = {name: [] for name in opened}
        tpots_s: dict[str, list[float]] = {name: [] for name in opened}
        for number, ids in enumerate(prompts):
            expected = None
            for name, model in opened.items():
                ttft_s, tpot_s, logits = answer(model, ids, new_tokens)
                expected = logits if expected is None else expected
                if not all(map(torch.equal, logits, expected)):
                    raise SystemExit(
                        f"{name}, cache {cache}, prompt {number}: other logits than the unmodified model's"
                    )
                if number:
                    ttfts_s[name].append(ttft_s)
                    tpots_s[name].append(tpot_s)
        for name in ("plain", "packed"):
            opened[name].promoe.close()
        for phase, times in (("TTFT", ttfts_s), ("TPOT", tpots_s)):
            ms = {name: 1e3 * estimate(values).value for name, values in times.items()}
            over = {name: paired_speedup(times[name], times["packed"]) for name in ("unmodified", "plain")}
            words = ", ".join(f"{name} / packed {e.value:.2f} ({e.low:.2f} - {e.high:.2f})" for name, e in over.items())
            print(
                f"{cache:>6} {phase}, ms: "
                + ", ".join(f"{name} {value:.0f}" for name, value in ms.items())
                + f"; {words}"
            )
            gains = {f"{name}_over_packed": ratio.value for name, ratio in over.items()}
            rows.append({"cache": cache, "phase": phase, **ms, **gains})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", nargs="+", default=["25%", "50%", "75%", "100%"])
    parser.add_argument("--prompts", type=int, default=5, help="that are counted")
    parser.add_argument("--tokens", type=int, default=24, help="per answer")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/packed.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    products = [row for name, sizes in SHAPES.items() for row in one_product(name, *sizes)]
    example = find_example()
    checkpoint = example.widened(Path("promoe-out"), REPEAT, torch.bfloat16)
    if not (checkpoint / FOLDER / INDEX).is_file():
        opened = open_headers(checkpoint)
        write_packed(opened.layers, opened.store, packed_folder(opened.store))
        opened.store.close()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    texts = json.loads(example.prompts_file.read_text())[: options.prompts + 1]
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    whole = models(checkpoint, options.cache, prompts, options.tokens)
    save(options.json, {"threads": torch.get_num_threads(), "products": products, "models": whole})
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
