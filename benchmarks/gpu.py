"""RAM to GPU: the tests that need a GPU, then systems beside each other at several cache sizes. Takes at most 8 minutes.

    python benchmarks/gpu.py [--cache 12.5% 25% 50% 75% 100%] [--pairs 3] [--new-tokens 32] [--repeat 208] [--minutes 8]
        [--no-tests] [--implementation grouped_mm] [--forms int8 int4] [--form-cache 25%] [--folder promoe-out]
        [--json FILE]

Prints the bandwidth of pinned copies, how long ids take to the host, and a table per cache size: milliseconds for a
prompt of 512 tokens and per token, relative to everything on the GPU and to the bound, hits, bytes, and how many
answers have the same tokens.

The model is the demo model with experts of real size (208 times as wide: 17 MB each, 6.6 GB in all). They are in RAM,
pinned and shared by all systems; everything else of each system is on the GPU. Systems take turns prompt by prompt;
figures are medians. `bound` is max(C, B / W): C is the time per token with everything on the GPU, B the bytes that the
same policy misses on demand, W what a pinned copy of 64 MiB reaches. Whatever there is no time left for is left out,
and the script says so.

`accelerate cpu_offload` brings every layer's weights when it runs. `streamed layers` is the same idea at its best: the
next layer's experts are copied while this one computes. Both bring all experts whatever the cache, and are measured
once, over `WHOLE_TOKENS` tokens; accelerate copies from pinned memory, too.

The last table compares experts in fewer bits (`--forms`) with 16 bits, in slots of the same bytes (`--form-cache`).
They are expanded on the GPU for each call. All of them are read from files and then kept in pinned RAM. In fewer bits
the answers are those of another model, so few have the same tokens, and `bound` is for the routing in 16 bits.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import DTYPE, OUT, heldout_prompts, in_form, make_parser, print_table, save, widened_demo
from streamed_layers import StreamedLayers
from torch import nn

import promoe
from promoe.commands.bench.example import find_example
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.systems import System
from promoe.commands.demo.systems import SYSTEMS, to_compare
from promoe.commands.lower_bound import missed_by_answer
from promoe.commands.measure import REPETITION_PENALTY, Generation, generate, tpots_s, ttfts_s
from promoe.experts.adapters.base import set_tensor
from promoe.model.placement import place
from promoe.runtime.sizes import plan_pools
from promoe.stats.routing import RoutedPass, RoutingRecorder
from promoe.transfer.devices import Device, open_device
from promoe.units import format_megabytes, format_ms, format_percent, format_times, ratio

MIB = 2**20
LONG_TOKENS = 512
RESIDENT, OFFLOAD, STREAMED = "all on the GPU", "accelerate cpu_offload", "streamed layers"
BYPASS, IN_SLOTS = "promoe, defaults", "promoe, slots for all"
IN_FILES = "16 bits, from files"
PROBE_BYTES, PROBES, ID_PROBES = 64 * MIB, 20, 200
WHOLE_TOKENS = 8
TESTS_S = 150.0  # at most
FORMS_S = 120.0  # to quantise the experts twice on the CPU, and to measure
Run = Callable[[Any, Any], Generation]


def pinned_bandwidth(device: Device, nbytes: int = PROBE_BYTES) -> float:
    """Return the bytes per second of copies from pinned memory to the device."""
    source, target, queue = device.allocate_pinned(nbytes), device.allocate(nbytes), device.new_queue()
    times_s = []
    for _ in range(PROBES):
        start_s = time.perf_counter()
        queue.copy_all([(target, source)])
        queue.mark().wait_on_host()
        times_s.append(time.perf_counter() - start_s)
    return nbytes / min(times_s)


def id_latency_s(device: Device) -> float:
    """Return the seconds until a layer's ids are on the host if nothing is computed before them."""
    ids, queue, times_s = device.allocate(64), device.current(), []
    for _ in range(ID_PROBES):
        start_s = time.perf_counter()
        queue.copy_to_host(device.allocate_pinned(ids.nbytes), ids)
        queue.mark().wait_on_host()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def sharing_experts(model: Any) -> Any:
    """Return a copy of a model that has the very same expert tensors."""
    layers = promoe.find_moe_layers(model)
    return copy.deepcopy(model, {id(tensor): tensor for layer in layers for tensor in layer.parameters()})


def with_own_experts(model: Any) -> Any:
    """Give a model parameters of its own over the very same memory, so that they can be pointed elsewhere."""
    for layer in promoe.find_moe_layers(model):
        for path, tensor in zip(layer.paths, layer.parameters(), strict=True):
            set_tensor(layer.experts, path, nn.Parameter(tensor.data, requires_grad=False))
    return model


@contextmanager
def whole_models(base: Any, device: Device, with_offload: bool) -> Iterator[dict[str, Any]]:
    """Open the systems that bring every layer's experts whenever it runs."""
    found: dict[str, Any] = {}
    streamed = found[STREAMED] = with_own_experts(sharing_experts(base))
    place(streamed, promoe.find_moe_layers(streamed), device)
    if with_offload and find_spec("accelerate") is not None:
        from accelerate import cpu_offload

        found[OFFLOAD] = cpu_offload(sharing_experts(base), execution_device=device.torch_device)
    with ExitStack() as close:
        close.callback(StreamedLayers(streamed, device).close)
        yield found


@contextmanager
def patched_models(base: Any, cache: str, predictor: Path | None) -> Iterator[dict[str, Any]]:
    """Patch models over one set of experts; with a cache for all of them, once by default and once with slots."""
    systems = list(to_compare(True, predictor))
    if cache == "100%":
        systems = [
            System(BYPASS, "promoe", "", promoe.PromoeConfig()),
            System(IN_SLOTS, "promoe", "", SYSTEMS[-2].config),
        ]
    found: dict[str, Any] = {}
    with ExitStack() as close:
        for system in systems:
            model = found[system.name] = with_own_experts(sharing_experts(base))
            promoe.patch(model, device="cuda", cache=cache, predictor=system.predictor, config=system.config)
            close.callback(promoe.unpatch, model)
        yield found


@contextmanager
def models_in_forms(
    checkpoint: Path, forms: Sequence[str], cache_bytes: int, implementation: str
) -> Iterator[dict[str, Any]]:
    """Open a checkpoint with its experts in files in 16 bits, then in each form, with slots of `cache_bytes`."""
    found: dict[str, Any] = {}
    with ExitStack() as close:
        for name, experts in {IN_FILES: "checkpoint", **{f"{form}, expanded": form for form in forms}}.items():
            if experts != "checkpoint":
                in_form(checkpoint, experts)
            model = found[name] = promoe.from_pretrained(checkpoint, experts=experts, device="cuda", cache=cache_bytes)
            close.callback(model.promoe.close)  # type: ignore[union-attr]
            model.set_experts_implementation(implementation)
        yield found


def demo_prompts(count: int, device: Device) -> list[dict[str, torch.Tensor]]:
    """Return `count` ordinary prompts and one of 512 tokens, on the device."""
    ids = heldout_prompts(max(count, 8))
    ids = [*ids[:count], torch.cat([one[0] for one in ids]).repeat(8)[:LONG_TOKENS][None]]
    ids = [one.to(device.torch_device) for one in ids]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


@dataclass(frozen=True)
class Bench:
    """One model's systems at several cache sizes.

    Attributes:
        base: the model in RAM.
        resident: the same on the device.
        prompts: on the device; the last one is long.
        run: generates.
        routing: of `resident`, which `run` was asked for: the first prompt, then all.
        bandwidth: bytes per second of pinned copies.
        device: where.
    """

    base: Any
    resident: Any
    prompts: list[Any]
    run: Run
    routing: list[list[RoutedPass]]
    bandwidth: float
    device: Device

    @classmethod
    @contextmanager
    def of(cls, base: Any, prompts: list[Any], run: Run, bandwidth: float, device: Device) -> Iterator[Bench]:
        """Pin a model's experts, put a copy of it on the device, and record its routing."""
        pinned = device.pin([tensor for layer in promoe.find_moe_layers(base) for tensor in layer.parameters()])
        try:
            resident = with_own_experts(sharing_experts(base)).to(device.torch_device)
            routing = []
            with RoutingRecorder(resident, promoe.find_moe_layers(resident)) as recorder:
                for prompt in [prompts[0], *prompts]:
                    run(resident, prompt)
                    routing.append(recorder.take())
            yield cls(base, resident, prompts, run, routing, bandwidth, device)
        finally:
            pinned.undo()

    def at(self, cache: str, predictor: Path | None) -> list[dict[str, Any]]:
        """Measure one cache size, and print its table."""
        with patched_models(self.base, cache, predictor) as systems:
            return self._compare(f"cache {cache}", {RESIDENT: self.resident, **systems}, self.run, self.prompts)

    def whole(self, run: Run, with_offload: bool) -> list[dict[str, Any]]:
        """Measure the systems that bring all experts, on a short prompt and the long one."""
        prompts = [self.prompts[0], self.prompts[-1]]
        with whole_models(self.base, self.device, with_offload) as systems:
            return self._compare("no cache", {RESIDENT: self.resident, **systems}, run, prompts)

    def in_forms(self, checkpoint: Path, forms: Sequence[str], cache: str) -> list[dict[str, Any]]:
        """Measure experts in fewer bits beside 16 bits, with slots of the same bytes."""
        layers = promoe.find_moe_layers(self.base)
        plans = plan_pools(cache, [layer.layout for layer in layers], [layer.num_experts for layer in layers])
        cache_bytes = sum(plan.nbytes for plan in plans)
        with models_in_forms(checkpoint, forms, cache_bytes, layers[0].implementation) as systems:
            title = f"cache {cache} of the bytes in 16 bits"
            return self._compare(title, {RESIDENT: self.resident, **systems}, self.run, self.prompts)

    def _compare(self, title: str, models: dict[str, Any], run: Run, prompts: list[Any]) -> list[dict[str, Any]]:
        for model in models.values():
            run(model, prompts[0])
            if hasattr(model, "promoe"):
                model.promoe.reset_stats()
        answers: dict[str, list[Generation]] = {name: [] for name in models}
        for prompt in prompts:  # in the order A B C A B C, so that what drifts in the machine drifts for all
            for name, model in models.items():
                answers[name].append(run(model, prompt))
        rows = [self._row(title, name, model, answers) for name, model in models.items()]
        print(f"\n{title}")
        print_table([_HEAD, *map(_cells, rows)])
        return rows

    def _row(self, title: str, name: str, model: Any, answers: dict[str, list[Generation]]) -> dict[str, Any]:
        compute, times = tpots_s(answers[RESIDENT])[:-1], tpots_s(answers[name])[:-1]
        pairs = zip(answers[name], answers[RESIDENT], strict=True)
        row = {
            "cache": title.removeprefix("cache "),
            "system": name,
            "ttft_512_s": ttfts_s(answers[name])[-1],
            "tpot_s": median(times),
            "tpots_s": times,
            "same_answers": sum(own.tokens == other.tokens for own, other in pairs),
            "answers": len(answers[name]),
            "to_resident": median(own / other for own, other in zip(times, compute, strict=True)),
        }
        if hasattr(getattr(model, "promoe", None), "runtime"):
            decode = model.promoe.stats().decode
            missed = missed_by_answer(model.promoe.runtime.engine.scheduler.config, self.routing)[1:-1]
            bounds = [max(c, one.token_bytes / self.bandwidth) for c, one in zip(compute, missed, strict=True)]
            row |= {
                "bound_s": median(bounds),
                "stall_s": decode.stall_per_pass_s,
                "hit_rate": decode.hit_rate,
                "bytes_per_token": decode.bytes_per_token,
            }
        return row


_HEAD = ("", "TTFT 512, ms", "TPOT, ms", "x on GPU", "bound, ms", "x bound", "hit %", "MB/token", "same tokens")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    bound_s = row.get("bound_s")
    return (
        row["system"],
        format_ms(row["ttft_512_s"]),
        format_ms(row["tpot_s"]),
        format_times(row["to_resident"]).removesuffix("x"),
        format_ms(bound_s),
        format_times(None if bound_s is None else ratio(row["tpot_s"], bound_s)).removesuffix("x"),
        format_percent(row.get("hit_rate")),
        format_megabytes(row.get("bytes_per_token")),
        f"{row['same_answers']} of {row['answers']}",
    )


class Clock:
    """A clock that knows how much time is left to the whole script."""

    def __init__(self, minutes: float) -> None:
        self._end_s = time.perf_counter() + 60 * minutes

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._end_s - time.perf_counter()

    def allows(self, what: str, needed_s: float) -> bool:
        """Return whether there is so much time; print that something is left out if not."""
        if self.left_s() < needed_s:
            print(f"{what}: left out, {self.left_s():.0f} s are left and it takes about {needed_s:.0f}")
            return False
        return True


def sweep(bench: Bench, caches: Sequence[str], predictor: Path | None, clock: Clock) -> list[dict[str, Any]]:
    """Measure all cache sizes that there is time for."""
    tables: list[dict[str, Any]] = []
    longest_s = 20.0
    for cache in caches:
        if not clock.allows(f"cache {cache}", longest_s):
            continue
        start_s = time.perf_counter()
        tables += bench.at(cache, predictor)
        longest_s = max(longest_s, time.perf_counter() - start_s)
    return tables


def answering(new_tokens: int) -> Run:
    def run(model: Any, prompt: Any) -> Generation:
        return generate(
            model,
            prompt,
            new_tokens,
            min_new_tokens=new_tokens,
            repetition_penalty=REPETITION_PENALTY,
            pad_token_id=0,
        )

    return run


def run_tests() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-s", "tests/cuda"]
    try:
        return subprocess.run(command, check=False, timeout=TESTS_S).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests took more than {TESTS_S:.0f} s and were ended")
        return 1


def main() -> int:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--cache", nargs="*", default=["25%", "50%", "100%", "12.5%", "75%"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=208)
    parser.add_argument("--implementation", default="grouped_mm")
    parser.add_argument("--forms", nargs="*", default=["int8", "int4"])
    parser.add_argument("--form-cache", default="25%")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--folder", type=Path, default=OUT, help="for the model, 6.6 GB")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU that this build of torch can use: nothing was measured.")
        return 1
    clock, device = Clock(options.minutes), open_device("cuda")
    assert device is not None
    print(
        f"{device.name}, capability {torch.cuda.get_device_capability()}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; {options.implementation}, "
        f"{torch.get_num_threads()} threads"
    )
    failed = 0 if options.no_tests else run_tests()
    bandwidth, latency_s = pinned_bandwidth(device), id_latency_s(device)
    print(f"pinned copies reach {bandwidth / 1e9:.1f} GB/s; ids are on the host after {latency_s * 1e6:.0f} us")
    checkpoint = widened_demo(options.repeat, options.folder)
    prompts = demo_prompts(options.pairs, device)
    base = load_stock(checkpoint, DTYPE)
    base.set_experts_implementation(options.implementation)
    run = answering(options.new_tokens)
    rows: list[dict[str, Any]] = []
    with Bench.of(base, prompts, run, bandwidth, device) as bench:
        try:  # others' code: what it cannot do must not lose the rest
            rows += bench.whole(answering(WHOLE_TOKENS), with_offload=True)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            print(f"no cache: left out, {error!r}")
        rows += sweep(bench, options.cache, find_example().predictor, clock)
        if options.forms and clock.allows("experts in fewer bits", FORMS_S):
            rows += bench.in_forms(checkpoint, options.forms, options.form_cache)
    about = {"device": device.name, "torch": torch.__version__, "bandwidth_bytes_per_s": bandwidth}
    save(options.json, about | {"id_latency_s": latency_s, "demo": rows})
    return failed


if __name__ == "__main__":
    sys.exit(main())
