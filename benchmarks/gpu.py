"""RAM to GPU: the tests that need one, then systems beside each other at several cache sizes. Minutes, on one GPU.

    python benchmarks/gpu.py [--cache 12.5% 25% 50% 75%] [--pairs 3] [--new-tokens 32] [--repeat 208] [--no-tests] [--json FILE]

The demo model with its experts widened to real size (208: 17 MB each) in RAM, shared by all systems; everything else of
each system on the GPU. Systems take turns prompt by prompt; medians. `bound` is max(C, B / W): C the TPOT with everything on
the GPU, B the bytes that the same policy misses on demand, W what a pinned copy of 64 MiB reaches. Tokens that are not those
of the model on the GPU are counted: kernels that compute an expert by itself (`eager`) give the same bits.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import promoe
from promoe.bound import RoutingRecorder, bytes_per_token, token_bound_s
from promoe.demo.comparison import REPETITION_PENALTY
from promoe.demo.example import find_example
from promoe.demo.systems import SYSTEMS, learned_prefetch, load_stock
from promoe.measure import Generation, generate, interleaved, tpots_s, ttfts_s
from promoe.running import load_tokenizer, prompt_inputs
from promoe.units import aligned, format_megabytes, format_ms, format_percent, format_times, ratio

DTYPE, MIB = torch.bfloat16, 2**20
LONG_TOKENS = 512
RESIDENT, OFFLOAD = "all on the GPU", "accelerate cpu_offload"
PROBE_BYTES, PROBES = 64 * MIB, 20


def pinned_bandwidth() -> float:
    """Bytes per second of copies from pinned memory to the GPU."""
    source = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_s = []
    for _ in range(PROBES):
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3)
    return PROBE_BYTES / min(times_s)


def sharing_experts(model: Any) -> Any:
    """A copy of a model that has the very same expert tensors."""
    layers = promoe.find_moe_layers(model)
    return copy.deepcopy(model, {id(tensor): tensor for layer in layers for tensor in layer.parameters()})


def open_systems(base: Any, cache: str, predictor: Path | None) -> dict[str, Any]:
    systems = [*SYSTEMS, *([] if predictor is None else [learned_prefetch(predictor)])]
    found: dict[str, Any] = {}
    if find_spec("accelerate") is not None:
        from accelerate import cpu_offload

        found[OFFLOAD] = cpu_offload(sharing_experts(base), execution_device=torch.device("cuda"))
    for system in systems:
        config = replace(system.config, chunk_bytes=8 * MIB)
        found[system.name] = promoe.patch(
            sharing_experts(base), device="cuda", cache=cache, predictor=system.predictor, config=config
        )
    return found


def prompts_of(checkpoint: Path, count: int) -> tuple[list[Any], Any]:
    """`count` ordinary prompts and one of 512 tokens, on the GPU."""
    tokenizer: Any = load_tokenizer(str(checkpoint))
    texts = find_example().prompts(max(count, 8))
    inputs = [prompt_inputs(tokenizer, text) for text in texts]
    ids = torch.cat([one["input_ids"][0] for one in inputs]).repeat(8)[:LONG_TOKENS][None]
    inputs = [*inputs[:count], {"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    return [{name: tensor.to("cuda") for name, tensor in one.items()} for one in inputs], tokenizer


def measure(models: dict[str, Any], prompts: list[Any], run: Callable[[Any, Any], Generation]) -> dict[str, Any]:
    for model in models.values():
        run(model, prompts[0])
        if hasattr(model, "promoe"):
            model.promoe.reset_stats()
    systems = {name: (lambda prompt, model=model: run(model, prompt)) for name, model in models.items()}
    return interleaved(systems, prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", nargs="*", default=["12.5%", "25%", "50%", "75%"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=208)
    parser.add_argument("--implementation", default="eager")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU that this build of torch can use: nothing was measured.")
        return 1
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, capability {capability}, torch {torch.__version__}, transformers {transformers.__version__}")
    failed = 0
    if not options.no_tests:
        failed = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "cuda", "-s", "tests/cuda"], check=False
        ).returncode
    example = find_example()
    checkpoint = example.widened(Path("promoe-out"), options.repeat, DTYPE)
    prompts, tokenizer = prompts_of(checkpoint, options.pairs)

    def run(model: Any, prompt: Any) -> Generation:
        return generate(
            model,
            prompt,
            options.new_tokens,
            min_new_tokens=options.new_tokens,
            repetition_penalty=REPETITION_PENALTY,
            pad_token_id=tokenizer.pad_token_id,
        )

    base = load_stock(checkpoint, DTYPE)
    base.set_experts_implementation(options.implementation)
    resident = copy.deepcopy(base).to("cuda")
    with RoutingRecorder(resident) as recorder:
        routing = []
        for prompt in [prompts[0], *prompts]:
            run(resident, prompt)
            routing.append(recorder.take())
    bandwidth = pinned_bandwidth()
    print(
        f"pinned copies reach {bandwidth / 1e9:.1f} GB/s; {options.implementation}, {torch.get_num_threads()} threads"
    )
    tables = []
    for cache in options.cache:
        models = {RESIDENT: resident, **open_systems(base, cache, example.predictor)}
        answers = measure(models, prompts, run)
        compute = tpots_s(answers[RESIDENT])[:-1]
        rows = [
            ("", "TTFT 512, ms", "TPOT, ms", "bound, ms", "x bound", "stall, ms", "hit %", "MB/token", "same tokens")
        ]
        for system, model in models.items():
            times, bound_s, decode = tpots_s(answers[system])[:-1], None, None
            if hasattr(model, "promoe"):
                decode = model.promoe.stats().decode
                missed = bytes_per_token(model.promoe.runtime.engine.scheduler.config, routing)[1:-1]
                bound_s = median(token_bound_s(c, nbytes, bandwidth) for c, nbytes in zip(compute, missed, strict=True))
            pairs = zip(answers[system], answers[RESIDENT], strict=True)
            same = sum(own.tokens == other.tokens for own, other in pairs)
            ttft_s, tpot_s = ttfts_s(answers[system])[-1], median(times)
            row = {"cache": cache, "system": system, "ttft_512_s": ttft_s, "tpot_s": tpot_s, "bound_s": bound_s}
            tables.append(row | {"same_answers": same, "answers": len(prompts), "tpots_s": times})
            rows.append(
                (
                    system,
                    format_ms(ttft_s),
                    format_ms(tpot_s),
                    format_ms(bound_s),
                    format_times(None if bound_s is None else ratio(tpot_s, bound_s)).removesuffix("x"),
                    format_ms(None if decode is None else decode.stall_per_pass_s),
                    format_percent(None if decode is None else decode.hit_rate),
                    format_megabytes(None if decode is None else decode.bytes_per_token),
                    f"{same} of {len(prompts)}",
                )
            )
        print(f"\ncache {cache}\n" + "\n".join(aligned(rows)), flush=True)
        for model in models.values():
            if hasattr(model, "promoe"):
                promoe.unpatch(model)
        del models
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": name, "torch": torch.__version__, "bandwidth_bytes_per_s": bandwidth, "rows": tables}
    options.json.write_text(json.dumps(about, indent=1))
    print(f"\nwritten to {options.json}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
