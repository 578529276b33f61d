"""What each idea buys in decode, on the real disk and behind an emulated link whose transfer takes as long as computing.

    python benchmarks/decode.py [--caches 12.5% 25% 50%] [--emulated 25%] [--pairs 6] [--new-tokens 24] [--json FILE]

Prints, for each cache, the demo's table (medians; `bound` is max(C, B / W)), the ratios of time per token, prompt by
prompt, with 95% bootstrap intervals, and how much of the time the governor had prefetch on. The ratios are:

- on-demand LRU in id order / the same with preemption, reordering and next-use eviction;
- the latter / the same with gate prefetch, with the demo model's trained predictor, and with random predictions.

The demo model with experts of real size answers held-out ShareGPT prompts; all systems take turns in one process. From
the real disk the model computes on every core. Behind the emulated link one core less computes: it stands for a copy
engine that moves the bytes.

Takes about 20 minutes on two cores. For small differences between settings use lockstep.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import DTYPE, OUT, heldout_prompts, make_parser, save, widened_demo

from promoe.commands.demo.comparison import Reference, Task, compare, record
from promoe.commands.demo.example import find_example
from promoe.commands.demo.systems import SYSTEMS, OnDisk, System, to_compare
from promoe.commands.lower_bound import bytes_per_token
from promoe.commands.measure import paired_speedup, tpots_s
from promoe.stats.text_report import text_comparison
from promoe.transfer.links import EmulatedLink

ON_DEMAND, _, NEXT_USE, GATE = (system.name for system in SYSTEMS)
LEARNED, RANDOM = to_compare(True, Path())[-1].name, "random predictions"
# Slower system, faster system, and the ratio that is wanted.
RATIOS = (
    (ON_DEMAND, NEXT_USE, "at least 1.3 at 20% or below"),
    (NEXT_USE, GATE, "at least 1.05 at 12.5%, never below 1 at 20 and 35%; 1.15 emulated"),
    (NEXT_USE, LEARNED, "at least 1.05 at 12.5%, never below 0.97; 1.15 emulated"),
    (NEXT_USE, RANDOM, "interval includes 0.97 or more"),
)


class SlowedFiles(OnDisk):
    """A checkpoint's files over an emulated link; copied from the page cache, as no disk keeps up reliably."""

    read_mode = "page_cache"

    def __init__(self, checkpoint: Path, reference: Reference, cache: str) -> None:
        super().__init__(checkpoint, DTYPE)
        self.link = EmulatedLink(bandwidth_bytes_per_s=1e9)
        probe: Any = self.patched(SYSTEMS[2], cache)
        missed = bytes_per_token(probe.promoe.runtime.engine.scheduler.config, reference.routing)[1:]
        probe.promoe.close()
        # The misses of next-use eviction without prefetch take as long as computing a token.
        self.link = EmulatedLink(bandwidth_bytes_per_s=median(missed) / reference.compute_s)


def measure(
    title: str, source: OnDisk, resident: Any, reference: Reference, task: Task, cache: str, systems: Sequence[System]
) -> dict[str, Any]:
    """Print the figures of all systems at one cache size, and return them."""
    result = compare(source, resident, reference, task, cache, OUT / "benchmark-timeline.json", systems)
    print(f"\n{title}, cache {cache}, link {result.link}, W {result.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
    print(text_comparison(result.runs, baseline=ON_DEMAND))
    ratios = {}
    for slow, fast, wanted in RATIOS:
        ratio = paired_speedup(tpots_s(result.answers[slow]), tpots_s(result.answers[fast]))
        ratios[f"{slow} / {fast}"] = ratio
        print(f"  {slow} / {fast}: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}); wanted: {wanted}")
    for run in result.runs:
        if run.stats.predictor is not None:
            print(f"  {run.name}: prefetch on {run.stats.decode.prefetch_on_share:.0%} of decode layer visits")
    runs = {
        run.name: {"tpot_s": run.tpot_s, "bound_s": run.bound_s, "stats": run.stats.to_json()} for run in result.runs
    }
    return {
        "title": title,
        "cache": cache,
        "bandwidth_bytes_per_s": result.bandwidth_bytes_per_s,
        "runs": runs,
        "ratios": ratios,
    }


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--caches", nargs="*", default=["12.5%", "25%", "50%"], help="real disk")
    parser.add_argument("--emulated", nargs="*", default=["25%"], help="emulated link, transfer = compute")
    parser.add_argument("--pairs", type=int, default=6, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    checkpoint = widened_demo()
    warm_up, *prompts = (
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in heldout_prompts(options.pairs + 1)
    )
    task = Task(warm_up, prompts, options.new_tokens, pad_token_id=0)
    systems = (*to_compare(True, find_example().predictor), System(RANDOM, SYSTEMS[3].config, predictor="random"))
    disk = OnDisk(checkpoint, DTYPE)
    resident = disk.resident()
    rows = []
    if options.caches:
        reference = record(resident, task)
        for cache in options.caches:
            rows.append(measure("real disk, O_DIRECT", disk, resident, reference, task, cache, systems))
    if options.emulated:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        reference = record(resident, task)
        for cache in options.emulated:
            link = SlowedFiles(checkpoint, reference, cache)
            title = "emulated link, transfer = compute"
            rows.append(measure(title, link, resident, reference, task, cache, systems))
    save(options.json, rows)


if __name__ == "__main__":
    main()
