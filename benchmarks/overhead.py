"""What promoe costs when nothing has to be fetched, and what one miss costs beyond its bytes.

    python benchmarks/overhead.py [--json promoe-out/benchmarks/overhead.json] [--widened DIR] [--rounds 400]

1. Python per MoE layer: a model of tiny experts (E = 64, top 4), everything resident in slots (`bypass` off), one token
   per forward; (patched - unpatched) / layers, for 1, 10 and 100 layers, that is E, 10 E and 100 E slots.
2. One miss: the same model with the expert it needs next always absent, its bytes copied in RAM (a few KB);
   (time with misses - time without) / misses.
3. With `--widened`: decode of the widened demo model, unpatched, patched with every expert in slots, and bypassed.

All variants of a table are interleaved, one forward each in turn; medians and 95% bootstrap intervals are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import save
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import promoe

NUM_EXPERTS = 64
TOP_K = 4


def tiny_model(num_layers: int) -> Qwen2MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    return Qwen2MoeForCausalLM(config).eval()


def interleaved_us(variants: dict[str, Callable[[int], object]], rounds: int) -> dict[str, np.ndarray]:
    """Microseconds of each variant per round, `[rounds]`, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        for round_idx in range(20):
            run(round_idx)
    for round_idx in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run(round_idx)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: np.array(values) for name, values in times.items()}


def median_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """(median, low, high) with a 95% bootstrap interval."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(values, (1000, len(values))), axis=1)
    return float(np.median(values)), float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def per_layer(rounds: int) -> list[dict[str, float]]:
    print(f"\nPython per MoE layer, everything resident in slots (E = {NUM_EXPERTS}, top {TOP_K}, one token, 1 thread)")
    print(f"{'layers':>7} {'slots':>7} {'unpatched us':>13} {'patched us':>11} {'us per layer':>13}  95% interval")
    table = []
    for num_layers in (1, 10, 100):
        stock, patched = tiny_model(num_layers), tiny_model(num_layers)
        promoe.patch(
            patched,
            cache="100%",
            predictor=None,
            link="host",
            config=promoe.PromoeConfig(bypass=False),
        )
        token = torch.tensor([[1]])
        fill = torch.arange(64).reshape(1, -1)
        with torch.inference_mode():
            for _ in range(3):
                patched(fill, use_cache=False)
            for expert_token in range(64):
                patched(torch.tensor([[expert_token]]), use_cache=False)
            times = interleaved_us(
                {
                    "unpatched": lambda _, m=stock, t=token: m(t, use_cache=False),
                    "patched": lambda _, m=patched, t=token: m(t, use_cache=False),
                },
                max(20, rounds // num_layers),
            )
        overhead, low, high = median_interval((times["patched"] - times["unpatched"]) / num_layers)
        row = {
            "layers": num_layers,
            "slots": num_layers * NUM_EXPERTS,
            "unpatched_us": float(np.median(times["unpatched"])),
            "patched_us": float(np.median(times["patched"])),
            "us_per_layer": overhead,
            "low": low,
            "high": high,
        }
        table.append(row)
        print(
            f"{num_layers:7d} {row['slots']:7.0f} {row['unpatched_us']:13.1f} {row['patched_us']:11.1f} "
            f"{overhead:13.1f}  {low:.1f} - {high:.1f}"
        )
        promoe.unpatch(patched)
    print("bound: under 100 us per layer, flat in slots")
    return table


def per_miss(rounds: int) -> dict[str, float]:
    """Two tokens in turn, in a cache of exactly the experts of one of them: every forward misses what they do not share."""
    model = tiny_model(10)
    resident = tiny_model(10)
    promoe.patch(resident, cache="100%", predictor=None, link="host", config=promoe.PromoeConfig(bypass=False))
    promoe.patch(model, cache=f"{100 * 10 * TOP_K / (10 * NUM_EXPERTS)}%", predictor=None, link="host")
    with torch.inference_mode():
        variants = {
            "resident": lambda r, m=resident: m(torch.tensor([[1 + r % 2]]), use_cache=False),
            "missing": lambda r, m=model: m(torch.tensor([[1 + r % 2]]), use_cache=False),
        }
        for run in variants.values():
            run(0), run(1)
        model.promoe.reset_stats()
        times = interleaved_us(variants, rounds)
    decode = model.promoe.stats().decode
    misses = (decode.needed - decode.hits) / decode.passes
    cost, low, high = median_interval((times["missing"] - times["resident"]) / misses)
    print(f"\nOne miss beyond its bytes ({misses:.1f} misses per token of {10 * TOP_K}, experts of 6 KB): ", end="")
    print(f"{cost:.1f} us ({low:.1f} - {high:.1f}); bound: at most 150 us; ready rate {decode.ready_rate:.2f}")
    for patched in (model, resident):
        promoe.unpatch(patched)
    return {"misses_per_token": misses, "us_per_miss": cost, "low": low, "high": high}


def widened(folder: Path, rounds: int) -> dict[str, float]:
    """Decode TPOT of the widened model: unpatched, every expert in slots, bypassed."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    for parameter in stock.parameters():  # private memory, 64-byte aligned, as the others have
        parameter.data = parameter.data.clone()
    slots = promoe.from_pretrained(folder, cache="100%", config=promoe.PromoeConfig(bypass=False))
    bypassed = promoe.from_pretrained(folder, cache="100%")
    prompt = torch.arange(5, 37).reshape(1, -1)
    times: dict[str, list[float]] = {"unpatched": [], "slots": [], "bypass": []}
    models = {"unpatched": stock, "slots": slots, "bypass": bypassed}
    caches = {}
    with torch.inference_mode():
        for name, model in models.items():
            model.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)  # fills the slots
            caches[name] = model(prompt, use_cache=True)
        tokens = {name: out.logits[:, -1:].argmax(-1) for name, out in caches.items()}
        for _ in range(rounds):
            for name, model in models.items():
                start = time.perf_counter()
                out = model(tokens[name], past_key_values=caches[name].past_key_values, use_cache=True)
                times[name].append(time.perf_counter() - start)
                tokens[name] = out.logits[:, -1:].argmax(-1)
    missed = slots.promoe.stats().decode
    result = {f"{name}_ms": float(np.median(values[5:])) * 1e3 for name, values in times.items()}
    ratio = np.array(times["slots"][5:]) / np.array(times["unpatched"][5:])
    result["ratio"], result["low"], result["high"] = median_interval(ratio)
    print(f"\nWidened model, decode of {rounds} tokens, {torch.get_num_threads()} threads, medians:")
    print("  " + ", ".join(f"{name[:-3]} {value:.2f} ms" for name, value in result.items() if name.endswith("_ms")))
    print(f"  slots / unpatched = {result['ratio']:.3f} ({result['low']:.3f} - {result['high']:.3f}); bound: 1.05")
    print(f"  hit rate {missed.hit_rate:.3f} over the whole run, filling included")
    for model in (slots, bypassed):
        model.promoe.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/overhead.json"))
    parser.add_argument("--widened", type=Path, help="folder of the widened demo model")
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: dict[str, object] = {"per_layer": per_layer(options.rounds), "per_miss": per_miss(options.rounds)}
    torch.set_num_threads(threads)
    if options.widened:
        results["widened"] = widened(options.widened, options.rounds // 4)
    save(options.json, results)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
