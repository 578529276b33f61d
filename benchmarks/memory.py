"""What opening and running a model whose experts stay on disk takes in memory and time.

    python benchmarks/memory.py [--repeats 32 128] [--cache 25%] [--json promoe-out/benchmarks/memory.json]

Each line is a fresh process that opens the widened demo model (experts r times as wide) and generates 16 tokens. Memory
is the peak of RssAnon + RssShmem, less the same process after its imports; the bound is the bytes of all other weights
plus slots plus 128 MB. The page cache (RssFile) is not counted: it is the system's to take back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

MEGABYTE = 1e6
ALLOWANCE_BYTES = 128_000_000


def anonymous_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def measure(folder: str, cache: str) -> dict[str, float]:
    """Run in a fresh process: open, generate, and watch."""
    import torch
    import transformers

    import promoe

    transformers.logging.disable_progress_bar()
    # The first use of a model class imports its module; that belongs to the imports.
    transformers.Qwen2MoeForCausalLM.__name__  # noqa: B018
    torch.ones(1) @ torch.ones(1)
    baseline = anonymous_bytes()
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    model = promoe.from_pretrained(folder, cache=cache)
    ready_s = time.perf_counter() - start
    opened = anonymous_bytes() - baseline
    model.generate(torch.arange(5, 37).reshape(1, -1), max_new_tokens=16, do_sample=False, pad_token_id=0)
    done.set()
    watcher.join()
    stats = model.promoe.stats()
    other = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." not in name)
    model.promoe.close()
    return {
        "ready_s": ready_s,
        "opened_bytes": opened,
        "peak_bytes": peak - baseline,
        "slot_bytes": stats.cache_bytes,
        "other_weight_bytes": other,
        "expert_bytes": sum(n * b for n, b in zip(stats.num_experts, stats.expert_bytes, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--equal-cache", help="also run every width with this cache in bytes, for example 512MiB")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/memory.json"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
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
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=2))
    over = [row for row in rows if row["peak_bytes"] > row["bound_bytes"]]
    print(f"{len(rows) - len(over)} of {len(rows)} within the bound; written to {options.json}")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
