"""What opening and running a model whose experts stay on disk takes in memory and time.

    python benchmarks/memory.py [--repeats 32 128] [--cache 25%] [--equal-cache 256MiB] [--forms] [--prompt-tokens 512 1900]
        [--json FILE]

Prints a row per model: seconds until it is open, the memory that it then has, and its peak while it generates 16
tokens, beside the bound: all other weights, the slots and 128 MB. Each row is a fresh process that opens the demo model
with experts made so many times as wide (--repeats). Memory is RssAnon + RssShmem, less that of the same process after
its imports. The page cache (RssFile) is not counted: it is the system's to take back. Ends with status 1 if a peak
exceeds its bound.

With --forms, the narrowest model is also opened from checkpoints in fewer bits: their bound is the same, of the weights as
they are in memory.

With --prompt-tokens it also prints what prompts of so many tokens take beside the weights of the widest model, and the
median time of one: unmodified and patched, and both again with small caches of oneDNN's programs, of which there is one
per shape of a product.

Takes a minute on two cores (and as long once, to write the models), with prompts some minutes more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import DTYPE, make_parser, print_table, save, widened_demo
from safetensors.torch import load_file, save_file

import promoe
from promoe.commands.bench.gguf_writer import write_gguf
from promoe.commands.bench.stock import load_stock

MEGABYTE = 1e6
ALLOWANCE_BYTES = 128_000_000
PROMPTS = 5
UNMODIFIED = "unmodified"
# Of `packed_weights` in the tests, and of GGUF.
SAFETENSORS_FORMS = ("FP8 by channel", "W4A16 in groups", "AWQ gemm", "GPTQ 4 bits")
GGUF_FORMS = ("q8_0", "q4_0")
# Programs that oneDNN and torch keep, by what the table calls it.
PROGRAMS = {"1024": {}, "64": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}}


def anonymous_bytes() -> int:
    """Return RssAnon + RssShmem of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class Peak:
    """The most memory that this process had while it was watched."""

    nbytes = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look every two milliseconds, in a thread."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                self.nbytes = max(self.nbytes, anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def imported_bytes() -> int:
    """Return the memory of this process after its imports."""
    # The first use of a model class imports its module; that belongs to the imports.
    transformers.Qwen2MoeForCausalLM.__name__  # noqa: B018
    torch.ones(1) @ torch.ones(1)
    return anonymous_bytes()


def other_weight_bytes(model: Any) -> int:
    """Return the bytes of all weights that do not belong to experts, as they are in memory."""
    named = (*model.named_parameters(), *model.named_buffers())
    return sum(tensor.nbytes for name, tensor in named if ".experts." not in name)


def measure(folder: str, cache: str) -> dict[str, float]:
    """Open a model in this fresh process, generate, and return times and memory."""
    baseline, peak = imported_bytes(), Peak()
    with peak.watching():
        start_s = time.perf_counter()
        model: Any = promoe.from_pretrained(folder, cache=cache)
        ready_s = time.perf_counter() - start_s
        opened = anonymous_bytes() - baseline
        model.generate(torch.arange(5, 37).reshape(1, -1), max_new_tokens=16, do_sample=False, pad_token_id=0)
    stats, other = model.promoe.stats(), other_weight_bytes(model)
    model.promoe.close()
    return {
        "ready_s": ready_s,
        "opened_bytes": opened,
        "peak_bytes": peak.nbytes - baseline,
        "bound_bytes": other + stats.cache_bytes + ALLOWANCE_BYTES,
        "expert_bytes": sum(n * b for n, b in zip(stats.num_experts, stats.expert_bytes, strict=True)),
    }


@torch.inference_mode()
def measure_prompts(folder: str, cache: str, tokens: int) -> dict[str, float]:
    """Read prompts in this fresh process, and return their time and what they take beside the weights."""
    baseline, peak = imported_bytes(), Peak()
    if cache == UNMODIFIED:
        model: Any = load_stock(Path(folder), DTYPE)
        weights = sum(tensor.nbytes for tensor in model.parameters())
    else:
        model = promoe.from_pretrained(folder, cache=cache)
        weights = other_weight_bytes(model) + model.promoe.stats().cache_bytes
    generator, seconds = torch.Generator().manual_seed(0), []
    with peak.watching():
        for _ in range(PROMPTS):
            ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=generator)
            start_s = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1)
            seconds.append(time.perf_counter() - start_s)
    if cache != UNMODIFIED:
        model.promoe.close()
    return {"beside_bytes": peak.nbytes - baseline - weights, "prompt_s": median(seconds[1:])}


def in_fresh_process(*arguments: object, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run this script as a child that measures one row."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    ).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def opening(folders: Mapping[str, Path], caches: Sequence[str]) -> list[dict[str, Any]]:
    """Print the first table."""
    table = [("model", "cache", "experts, MB", "ready, s", "opened, MB", "peak, MB", "bound, MB")]
    rows = []
    for name, folder in folders.items():
        for cache in caches:
            one = in_fresh_process(folder, cache)
            rows.append({"model": name, "cache": cache, **one})
            mb = (f"{one[f'{name}_bytes'] / MEGABYTE:.1f}" for name in ("opened", "peak", "bound"))
            table.append((name, cache, f"{one['expert_bytes'] / MEGABYTE:.0f}", f"{one['ready_s']:.2f}", *mb))
    print_table(table)
    return rows


def in_fewer_bits(checkpoint: Path) -> dict[str, Path]:
    """Return copies of a checkpoint in fewer bits, by form. Those of safetensors files have random weights.

    Memory does not depend on values, and the tests have random weights in every form.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from packed_weights import FORMS  # type: ignore[import-not-found, unused-ignore]

    found = {}
    for name in SAFETENSORS_FORMS:
        folder = checkpoint.with_name(f"{checkpoint.name}-{name.replace(' ', '-')}")
        if not (folder / "config.json").is_file():
            write_packed(checkpoint, folder, FORMS[name])
        found[name] = folder
    for kind in GGUF_FORMS:
        path = checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf")
        if not path.is_file():
            write_gguf(checkpoint, path, kind, DTYPE)
        found[f"GGUF {kind}"] = path
    return found


def write_packed(checkpoint: Path, folder: Path, form: Any) -> None:
    """Write a checkpoint with random linear weights in a form of the tests."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for shard in checkpoint.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(shard).items():
            if name.endswith("_proj.weight") and all(size % 32 == 0 for size in tensor.shape):
                module = name.removesuffix("weight")
                parts = form.make(*tensor.shape, generator)
                tensors |= {module + part: values for part, values in parts.items()}
            else:
                tensors[name] = tensor
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})
    for path in checkpoint.glob("*.json"):
        if path.name == "model.safetensors.index.json":
            names = {name: shard.name for shard in folder.glob("*.safetensors") for name in load_file(shard)}
            (folder / path.name).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        elif path.name != "config.json":
            shutil.copy(path, folder)
    config = json.loads((checkpoint / "config.json").read_text())  # last: with it, the copy is complete
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))


def prompts(folder: Path, cache: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Print the second table."""
    table, rows = [("tokens", "", "programs kept", "beside the weights, MB", "prompt, s")], []
    for tokens in lengths:
        for programs, environment in PROGRAMS.items():
            for system in (UNMODIFIED, cache):
                one = in_fresh_process(folder, system, tokens, environment=environment)
                rows.append({"tokens": tokens, "cache": system, "programs": int(programs), **one})
                beside = f"{one['beside_bytes'] / MEGABYTE:.0f}"
                name = system if system == UNMODIFIED else f"patched, {cache}"
                table.append((str(tokens), name, programs, beside, f"{one['prompt_s']:.2f}"))
    print_table(table)
    return rows


def main() -> int:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--repeats", type=int, nargs="+", default=[32, 128], help="how many times as wide experts are")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--equal-cache", help="also run every width with this cache in bytes, for example 512MiB")
    parser.add_argument("--forms", action="store_true", help="also open checkpoints in fewer bits")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[], help="also read prompts of so many tokens")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, cache, *tokens = options.child
        print(json.dumps(measure_prompts(folder, cache, int(tokens[0])) if tokens else measure(folder, cache)))
        return 0
    folders = {repeat: widened_demo(repeat) for repeat in options.repeats}
    caches = [options.cache, *filter(None, [options.equal_cache])]
    models = {f"{repeat} times as wide": folder for repeat, folder in folders.items()}
    if options.forms:
        models |= in_fewer_bits(folders[options.repeats[0]])
    rows = opening(models, caches)
    over = [row for row in rows if row["peak_bytes"] > row["bound_bytes"]]
    print(f"{len(rows) - len(over)} of {len(rows)} within the bound")
    if options.prompt_tokens:
        print()
        rows += prompts(folders[options.repeats[-1]], options.cache, options.prompt_tokens)
    save(options.json, rows)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
