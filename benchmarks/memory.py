"""What opening and running a model whose experts stay on disk takes in memory and time.

    python benchmarks/memory.py [--repeats 32 128] [--cache 25%] [--prompt-tokens 512 1900] [--json FILE]

Each line is a fresh process that opens the widened demo model (experts r times as wide) and generates 16 tokens. Memory
is the peak of RssAnon + RssShmem, less the same process after its imports; the bound is the bytes of all other weights
plus slots plus 128 MB. The page cache (RssFile) is not counted: it is the system's to take back.

With --prompt-tokens, prompts of so many tokens are read as well, by the widest model, unmodified and patched: what that takes
beside the weights, and the median time of one; again with small caches of oneDNN's programs, one for each shape of a product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import save

MEGABYTE = 1e6
ALLOWANCE_BYTES = 128_000_000
PROMPTS = 5
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def anonymous_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class Peak:
    """The most that this process had since `watching` began."""

    nbytes = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, a thread looks every two milliseconds."""
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


def _imported_bytes() -> int:
    """What this process has after its imports."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    # The first use of a model class imports its module; that belongs to the imports.
    transformers.Qwen2MoeForCausalLM.__name__  # noqa: B018
    torch.ones(1) @ torch.ones(1)
    return anonymous_bytes()


def measure(folder: str, cache: str) -> dict[str, float]:
    """Run in a fresh process: open, generate, and watch."""
    import torch

    import promoe

    baseline = _imported_bytes()
    peak = Peak()
    with peak.watching():
        start = time.perf_counter()
        model = promoe.from_pretrained(folder, cache=cache)
        ready_s = time.perf_counter() - start
        opened = anonymous_bytes() - baseline
        model.generate(torch.arange(5, 37).reshape(1, -1), max_new_tokens=16, do_sample=False, pad_token_id=0)
    stats = model.promoe.stats()
    other = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." not in name)
    model.promoe.close()
    return {
        "ready_s": ready_s,
        "opened_bytes": opened,
        "peak_bytes": peak.nbytes - baseline,
        "slot_bytes": stats.cache_bytes,
        "other_weight_bytes": other,
        "expert_bytes": sum(n * b for n, b in zip(stats.num_experts, stats.expert_bytes, strict=True)),
    }


def measure_prompts(folder: str, cache: str, tokens: int) -> dict[str, float]:
    """Run in a fresh process: read prompts; `cache` "none" is the unmodified model."""
    import torch

    import promoe
    from promoe.commands.bench.stock import load_stock

    baseline = _imported_bytes()
    patched = cache != "none"
    model = promoe.from_pretrained(folder, cache=cache) if patched else load_stock(Path(folder), torch.bfloat16)
    if patched:
        slots = model.promoe.stats().cache_bytes
        weights = slots + sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    else:
        weights = sum(p.nbytes for p in model.parameters())
    generator, peak, seconds = torch.Generator().manual_seed(0), Peak(), []
    with peak.watching(), torch.inference_mode():
        for _ in range(PROMPTS):
            ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=generator)
            start = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
    if patched:
        model.promoe.close()
    return {"beside_bytes": peak.nbytes - baseline - weights, "prompt_s": statistics.median(seconds[1:])}


def prompts_table(folder: Path, cache: str, lengths: list[int]) -> list[dict[str, object]]:
    """Prompts of each length, unmodified and patched, with the usual caches of programs and with small ones."""
    rows: list[dict[str, object]] = []
    print(f"\n{'tokens':>6} {'':>10} {'programs':>8} {'beside the weights, MB':>23} {'prompt s':>9}")
    for tokens in lengths:
        for programs, environment in (("1024", {}), ("64", SMALL_CACHES)):
            for name, of_child in (("unmodified", "none"), ("patched", cache)):
                command = [sys.executable, __file__, "--child", str(folder), of_child, str(tokens)]
                run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
                row = {"tokens": tokens, "system": name, "programs": int(programs), **json.loads(run.stdout)}
                rows.append(row)
                beside = row["beside_bytes"] / MEGABYTE
                print(f"{tokens:6d} {name:>10} {programs:>8} {beside:23.0f} {row['prompt_s']:9.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--equal-cache", help="also run every width with this cache in bytes, for example 512MiB")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[], help="also read prompts of so many tokens")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/memory.json"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, cache, *tokens = options.child
        print(json.dumps(measure_prompts(folder, cache, int(tokens[0])) if tokens else measure(folder, cache)))
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sharegpt_moe"))
    from widen import widen

    source = Path(__file__).parents[1] / "examples" / "sharegpt_moe" / "checkpoint"
    rows = []
    print(
        f"{'width':>6} {'cache':>8} {'experts MB':>11} {'ready s':>8} {'opened MB':>10} {'peak MB':>8} {'bound MB':>9}"
    )
    for repeat in options.repeats:
        folder = widen(source, Path("promoe-out") / f"widened-x{repeat}-bfloat16", repeat=repeat)
        for cache in (options.cache, *([options.equal_cache] if options.equal_cache else [])):
            command = [sys.executable, __file__, "--child", str(folder), cache]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            row = {"repeat": repeat, "cache": cache, **json.loads(output.splitlines()[-1])}
            row["bound_bytes"] = row["other_weight_bytes"] + row["slot_bytes"] + ALLOWANCE_BYTES
            rows.append(row)
            print(
                f"{repeat:6d} {cache:>8} {row['expert_bytes'] / MEGABYTE:11.0f} {row['ready_s']:8.2f} "
                f"{row['opened_bytes'] / MEGABYTE:10.1f} {row['peak_bytes'] / MEGABYTE:8.1f} "
                f"{row['bound_bytes'] / MEGABYTE:9.1f}"
            )
    prompts = prompts_table(folder, options.cache, options.prompt_tokens) if options.prompt_tokens else []
    save(options.json, [*rows, *prompts])
    over = [row for row in rows if row["peak_bytes"] > row["bound_bytes"]]
    print(f"{len(rows) - len(over)} of {len(rows)} within the bound; written to {options.json}")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
