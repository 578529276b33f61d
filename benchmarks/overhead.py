"""What promoe costs the host beside the bytes that it moves: per MoE layer, per miss, and inside the scheduler.

    python benchmarks/overhead.py [--rounds 400] [--tokens 60] [--widened FOLDER] [--json FILE]

Prints, each as a table or a line:

1. Microseconds of Python per MoE layer: a model of tiny experts (64, top 4), all of them in slots, one token per
   forward; (patched - unpatched) / layers, for 1, 10 and 100 layers.
2. Microseconds that one miss costs beyond its bytes: the same model with experts of a few KB that are always absent.
3. Microseconds of the scheduler's operations, for 48 layers of 128 experts, top 8, with made-up routing and no link.
   They run under the engine's lock while a model decodes. On a machine that is not idle, read the 10th percentile.
4. With --widened: milliseconds per token of a model with experts of real size, unpatched, with every expert in a slot,
   and as promoe runs it if everything fits.

Variants of one table take turns, one forward each. Medians, with 95% bootstrap intervals. Takes about two minutes on
two cores, and four with --widened.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DTYPE, make_parser, print_table, save
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.commands.measure import Estimate, estimate, paired_speedup
from promoe.scheduler import ExpertKey, PoolSpec, Scheduler, SchedulerConfig

# Of the tiny model.
NUM_EXPERTS, TOP_K = 64, 4
WARM_UP_ROUNDS = 20
IN_SLOTS = promoe.PromoeConfig(bypass=False)

# Of the scheduler: Qwen3-30B-A3B's sizes.
LAYERS, EXPERTS, CHOSEN, CHUNKS, CACHE_RATE = 48, 128, 8, 3, 0.25
# The share of a token's experts that the token before used too.
PERSISTENCE = 0.4


# -- a model of tiny experts --------------------------------------------------------------------------------------


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


def patched_tiny_model(num_layers: int, cache: str) -> Qwen2MoeForCausalLM:
    model = tiny_model(num_layers)
    promoe.patch(model, cache=cache, predictor=None, link="host", config=IN_SLOTS)
    return model


def interleaved_us(variants: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of each variant in each round; the variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_idx in range(-WARM_UP_ROUNDS, rounds):
        for name, run in variants.items():
            start_s = time.perf_counter()
            run(round_idx)
            if round_idx >= 0:
                times[name].append((time.perf_counter() - start_s) * 1e6)
    return times


def differences(more: list[float], less: list[float], share: float) -> Estimate:
    """Return the median, with its interval, of the pairs' differences divided by `share`."""
    return estimate([(one - other) / share for one, other in zip(more, less, strict=True)])


@torch.inference_mode()
def per_layer(rounds: int) -> list[dict[str, float]]:
    """Print what a layer with all of its experts in slots costs more than the unmodified one."""
    print(f"Python per MoE layer, everything in slots ({NUM_EXPERTS} experts, top {TOP_K}, one token, 1 thread)")
    rows = [("layers", "unpatched, us", "patched, us", "us per layer", "95% interval")]
    found = []
    for num_layers in (1, 10, 100):
        stock, patched = tiny_model(num_layers), patched_tiny_model(num_layers, "100%")
        for ids in [torch.arange(64).reshape(1, -1)] * 3 + [torch.tensor([[token]]) for token in range(64)]:
            patched(ids, use_cache=False)  # fills the slots
        token = torch.tensor([[1]])
        times = interleaved_us(
            {
                "unpatched": lambda _, m=stock, t=token: m(t, use_cache=False),
                "patched": lambda _, m=patched, t=token: m(t, use_cache=False),
            },
            max(20, rounds // num_layers),
        )
        cost = differences(times["patched"], times["unpatched"], num_layers)
        us = {name: float(np.median(values)) for name, values in times.items()}
        found.append({"layers": num_layers, **us, "us_per_layer": cost.value, "low": cost.low, "high": cost.high})
        interval = f"{cost.low:.1f} - {cost.high:.1f}"
        rows.append((str(num_layers), *(f"{value:.1f}" for value in us.values()), f"{cost.value:.1f}", interval))
        promoe.unpatch(patched)
    print_table(rows)
    print("wanted: less than 100 us per layer, the same for any number of slots")
    return found


@torch.inference_mode()
def per_miss(rounds: int) -> dict[str, float]:
    """Print what a miss costs: two tokens in turn, in a cache that has room for the experts of one of them."""
    resident, missing = patched_tiny_model(10, "100%"), patched_tiny_model(10, f"{100 * TOP_K / NUM_EXPERTS}%")
    tokens = [torch.tensor([[1]]), torch.tensor([[2]])]
    for model in (resident, missing):
        for token in tokens:
            model(token, use_cache=False)
    missing.promoe.reset_stats()
    times = interleaved_us(
        {
            "resident": lambda number: resident(tokens[number % 2], use_cache=False),
            "missing": lambda number: missing(tokens[number % 2], use_cache=False),
        },
        rounds,
    )
    decode = missing.promoe.stats().decode
    misses = (decode.needed - decode.hits) / decode.passes
    cost = differences(times["missing"], times["resident"], misses)
    print(
        f"\nOne miss beyond its bytes ({misses:.1f} misses per token of {10 * TOP_K}, experts of 6 KB): {cost.value:.1f} us "
        f"({cost.low:.1f} - {cost.high:.1f}); wanted: at most 150; ready rate {decode.ready_rate:.2f}"
    )
    for model in (resident, missing):
        promoe.unpatch(model)
    return {"misses_per_token": misses, "us_per_miss": cost.value, "low": cost.low, "high": cost.high}


# -- the scheduler by itself --------------------------------------------------------------------------------------


class Timings:
    """Microseconds of single calls, by the name of the operation."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        """Time the block once, for all these names."""
        start_s = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - start_s
        for name in names:
            self.us[name].append(elapsed_s * 1e6)


def scheduler_operations(num_tokens: int) -> dict[str, dict[str, float]]:
    """Print the times of the scheduler's operations, and of whole visits with more and more slots."""
    print(f"\nScheduler, us: {LAYERS} layers of {EXPERTS} experts, top {CHOSEN}, cache {CACHE_RATE:.0%}, next_use")
    timings = Timings()
    decode(timings, "", num_tokens, with_forecasts=False)
    decode(timings, "with three forecasts per layer, ", num_tokens, with_forecasts=True)
    for factor in (1, 10, 100):
        one_layer(timings, f"visit, {factor} x {EXPERTS} slots, all resident", factor * EXPERTS, 0, 20 * num_tokens)
    for factor in (1, 10, 99):  # where every expert of the layer has a slot, none can be missing
        slots = factor * EXPERTS - EXPERTS // 2
        one_layer(timings, f"visit, {slots} slots, one miss", slots, 1, 20 * num_tokens)
    found = {name: dict(zip(("p10", "median", "p90"), quantiles(us), strict=True)) for name, us in timings.us.items()}
    rows = [("", "p10", "median", "p90", "calls")]
    for name, one in found.items():
        rows.append((name, *(f"{value:.1f}" for value in one.values()), str(len(timings.us[name]))))
    print_table(rows)
    print("wanted: at most 15 for a pair of next_chunks and chunk_done, and 40 for a visit with all resident")
    return found


def quantiles(values: list[float]) -> list[float]:
    found: list[float] = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
    return found


def new_scheduler(num_slots: int, num_layers: int = LAYERS) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_experts=[EXPERTS] * num_layers,
            chunk_bytes=[(1 << 20,) * CHUNKS] * num_layers,
            pools=[PoolSpec(num_slots, tuple(range(num_layers)))],
        )
    )


def routing(num_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the layer visits of a decode: a layer and the experts that it needs."""
    rng = np.random.default_rng(0)
    latest = [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)]
    for _ in range(num_tokens):
        for layer_idx, ids in enumerate(latest):
            kept = ids[rng.random(CHOSEN) < PERSISTENCE]
            fresh = rng.permutation(np.setdiff1d(np.arange(EXPERTS), kept))[: CHOSEN - len(kept)]
            latest[layer_idx] = np.sort(np.concatenate([kept, fresh]))
            yield layer_idx, latest[layer_idx].tolist()


def decode(timings: Timings, prefix: str, num_tokens: int, with_forecasts: bool) -> None:
    """Time a decode in its steady state: pairs of `next_chunks(1)` and `chunk_done`, and the rest of each layer.

    The first pair after a layer event that needs a victim orders the pool's residents by eviction score; it counts as
    "ordering". With forecasts, each layer forecasts the next three, and six speculative pairs follow.
    """
    scheduler = new_scheduler(round(CACHE_RATE * LAYERS * EXPERTS))
    rng, filling = np.random.default_rng(1), Timings()
    for visit_idx, (layer_idx, ids) in enumerate(routing(num_tokens)):
        # After a third of the tokens the cache is full and the routing known.
        now = timings if visit_idx >= num_tokens // 3 * LAYERS else filling
        with now.timed(f"{prefix}layer: hint, begin_visit, admit, ready"):
            scheduler.hint(layer_idx, ids)
            visit = scheduler.begin_visit(layer_idx, ids)
            visit.admit()
            group = visit.ready()
        kind = "ordering"
        while True:
            visit.release(group)
            if visit.finished:
                break
            with now.timed(f"{prefix}pair: {kind}", f"{prefix}pair: all"):
                (lease,) = scheduler.next_chunks(1)
                scheduler.chunk_done(lease)
            kind = "no ordering"
            group = visit.ready()
        visit.close()
        if with_forecasts:
            for steps_ahead in (3, 2, 1):
                probabilities = rng.random(EXPERTS) ** 4
                with now.timed(f"{prefix}forecast"):
                    scheduler.forecast(steps_ahead, (layer_idx + steps_ahead) % LAYERS, probabilities)
            for _ in range(6):
                with now.timed(f"{prefix}pair: speculative"):
                    for lease in scheduler.next_chunks(1):
                        scheduler.chunk_done(lease)


def one_layer(timings: Timings, name: str, num_slots: int, num_missing: int, repeats: int) -> None:
    """Time whole visits of one layer of 100, of whose experts `num_missing` are absent."""
    scheduler = new_scheduler(num_slots, num_layers=100)
    scheduler.warm([ExpertKey(*divmod(idx, EXPERTS)) for idx in range(num_slots)])
    while leases := scheduler.next_chunks(1):
        scheduler.chunk_done(leases[0])
    rng = np.random.default_rng(2)
    for _ in range(repeats):
        resident = np.array([scheduler.is_resident(0, expert_idx) for expert_idx in range(EXPERTS)])
        order = rng.permutation(EXPERTS)
        missing = order[~resident[order]][:num_missing]
        ids = np.concatenate([missing, order[resident[order]][: CHOSEN - len(missing)]]).tolist()
        with timings.timed(name):
            scheduler.hint(0, ids)
            visit = scheduler.begin_visit(0, ids)
            visit.admit()
            visit.release(visit.ready())
            while not visit.finished:
                scheduler.chunk_done(scheduler.next_chunks(1)[0])
                visit.release(visit.ready())
            visit.close()


# -- experts of real size -----------------------------------------------------------------------------------------


@torch.inference_mode()
def widened(folder: Path, tokens: int) -> dict[str, float]:
    """Print the time per token unpatched, with every expert in a slot, and with promoe's own choice."""
    stock = load_stock(folder, DTYPE)
    for parameter in stock.parameters():  # private memory, as slots are, and not a mapped file
        parameter.data = parameter.data.clone()
    models: dict[str, PreTrainedModel] = {
        "unpatched": stock,
        "slots": promoe.from_pretrained(folder, cache="100%", config=IN_SLOTS),
        "promoe": promoe.from_pretrained(folder, cache="100%"),
    }
    prompt = torch.arange(5, 37).reshape(1, -1)
    outputs = {}
    for name, model in models.items():
        model.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)  # fills the slots
        outputs[name] = model(prompt, use_cache=True)

    def step(name: str) -> None:
        token, cache = outputs[name].logits[:, -1:].argmax(-1), outputs[name].past_key_values
        outputs[name] = models[name](token, past_key_values=cache, use_cache=True)

    times = interleaved_us({name: lambda _, name=name: step(name) for name in models}, tokens)
    ms = {name: float(np.median(values)) / 1e3 for name, values in times.items()}
    ratio = paired_speedup(times["slots"], times["unpatched"])
    print(
        f"\nModel with experts of real size, decode of {tokens} tokens, {torch.get_num_threads()} threads, ms per token:"
    )
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in ms.items()))
    print(f"  slots / unpatched: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}); wanted: at most 1.05")
    for name in ("slots", "promoe"):
        models[name].promoe.close()
    return {**ms, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=400, help="forwards of each variant")
    parser.add_argument("--tokens", type=int, default=60, help="tokens that the scheduler decodes")
    parser.add_argument("--widened", type=Path, help="folder of a model with experts of real size")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "per_layer": per_layer(options.rounds),
        "per_miss": per_miss(options.rounds),
        "scheduler": scheduler_operations(options.tokens),
    }
    torch.set_num_threads(threads)
    if options.widened:
        results["widened"] = widened(options.widened, max(10, options.rounds // 4))
    save(options.json, results)


if __name__ == "__main__":
    main()
