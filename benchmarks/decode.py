"""What each idea buys in decode, on the real disk and behind an emulated link whose transfer time equals compute.

    python benchmarks/decode.py [--caches 12.5% 25% 50%] [--emulated 25%] [--pairs 6] [--new-tokens 24] [--waste SHARE ...]
        [--json FILE]

Real disk: the model computes on every core, reads take what they need of them. Emulated link: one core less computes,
for on the machines that it stands for a copy engine moves the bytes and the host is free to plan.

All systems answer the same held-out ShareGPT prompts, interleaved, in one process: A B C A B C. Printed per cache rate:
the demo's table (medians; `bound` = max(C, B / W)), and ratios of TPOT per pair with 95% bootstrap intervals:

- on-demand LRU in id order / preemption, reordering and next-use eviction
- the latter / the same with gate prefetch; with the trained predictor of the demo model; with random predictions

`--waste 1 0.025` compares those with prefetch under these limits instead (`PromoeConfig.waste_share`; 1 is none).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save

from promoe.commands.demo.command import DTYPE, Demo
from promoe.commands.demo.comparison import Reference, compare, record
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import SYSTEMS, OnDisk, System, to_compare
from promoe.commands.lower_bound import bytes_per_token
from promoe.commands.measure import paired_speedup, tpots_s
from promoe.stats.text_report import text_comparison
from promoe.transfer.links import EmulatedLink

NEXT_USE, GATE, RANDOM = SYSTEMS[2].name, SYSTEMS[3].name, "random predictions"
LEARNED = to_compare(True, Path())[-1].name
RATIOS = (
    (SYSTEMS[0].name, NEXT_USE, "at least 1.3 at 20% or below"),
    (NEXT_USE, GATE, "at least 1.05 at 12.5%, never below 1 at 20 and 35%; 1.15 emulated"),
    (NEXT_USE, LEARNED, "at least 1.05 at 12.5%, never below 0.97; 1.15 emulated"),
    (NEXT_USE, RANDOM, "interval includes 0.97 or more"),
)


def measure(
    demo: Demo,
    source: Any,
    resident: Any,
    reference: Reference,
    cache: str,
    title: str,
    compared: tuple[System, ...],
    ratios: Sequence[tuple[str, str, str]],
) -> dict[str, Any]:
    """All systems at one cache rate; printed, and returned for the JSON."""
    result = compare(source, resident, reference, demo.task, cache, demo.out / "benchmark-timeline.json", compared)
    print(f"\n{title}, cache {cache}, link {result.link}, W {result.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
    print(text_comparison(result.runs, baseline=SYSTEMS[0].name))
    row: dict[str, Any] = {
        "title": title,
        "cache": cache,
        "bandwidth_bytes_per_s": result.bandwidth_bytes_per_s,
        "runs": {
            run.name: {"tpot_s": run.tpot_s, "bound_s": run.bound_s, "stats": run.stats.to_json()}
            for run in result.runs
        },
        "ratios": {},
    }
    for slow, fast, wanted in ratios:
        ratio = paired_speedup(tpots_s(result.answers[slow]), tpots_s(result.answers[fast]))
        row["ratios"][f"{slow} / {fast}"] = ratio
        print(
            f"  {slow} / {fast}: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}){wanted and f'; wanted: {wanted}'}"
        )
    for run in result.runs:
        if run.stats.predictor is not None:
            print(f"  {run.name}: prefetch on {run.stats.decode.prefetch_on_share:.0%} of decode layer visits")
    return row


def systems(demo: Demo) -> tuple[System, ...]:
    """The demo's, its predictor included, and one with useless predictions."""
    return (*demo.systems, System(RANDOM, SYSTEMS[3].config, predictor="random"))


def limited(demo: Demo, shares: Sequence[float]) -> tuple[System, ...]:
    """Without prefetch, and each kind of it under these limits of waste."""
    return (
        SYSTEMS[0],
        SYSTEMS[2],
        *(
            dataclasses.replace(
                system,
                name=f"{system.name}, {share:.1%}",
                config=dataclasses.replace(system.config, waste_share=share),
            )
            for system in demo.systems[3:]
            for share in shares
        ),
    )


class SlowedFiles(OnDisk):
    """A checkpoint's files over an emulated link; copied from the page cache, as no disk keeps up reliably."""

    link = EmulatedLink(bandwidth_bytes_per_s=1e9)
    read_mode = "page_cache"

    def equalise(self, reference: Reference, cache: str) -> None:
        """Let the misses of next-use eviction without prefetch take as long as computing a token."""
        probe = self.patched(SYSTEMS[2], cache)
        missed = bytes_per_token(probe.promoe.runtime.engine.scheduler.config, reference.routing)[1:]
        probe.promoe.close()
        self.link = EmulatedLink(bandwidth_bytes_per_s=median(missed) / reference.compute_s)


def _reference(resident: Any, demo: Demo) -> Reference:
    """The unmodified model's answers with the present number of threads, which is printed."""
    print(f"\n{torch.get_num_threads()} threads")
    return record(resident, demo.task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="*", default=["12.5%", "25%", "50%"], help="real disk")
    parser.add_argument("--emulated", nargs="*", default=["25%"], help="emulated link, transfer = compute")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--waste", type=float, nargs="+", help="limits of what prefetch may waste, as shares")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/decode.json"))
    options = parser.parse_args()
    demo = Demo(Options(prompts=options.pairs, max_new_tokens=options.new_tokens, steps=True))
    compared, ratios = systems(demo), RATIOS
    if options.waste:
        compared = limited(demo, options.waste)
        names = [system.name for system in compared[2:]]
        ratios = tuple((NEXT_USE, name, "") for name in names)
        for first in range(0, len(names), len(options.waste)):  # of one predictor, the first limit against the others
            ratios += tuple((names[first], name, "") for name in names[first + 1 : first + len(options.waste)])
    rows = []
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, DTYPE)
    disk = OnDisk(checkpoint, DTYPE)
    resident = disk.resident()
    print(f"{options.pairs} prompts x {options.new_tokens} tokens")
    if options.caches:
        reference = _reference(resident, demo)
        for cache in options.caches:
            rows.append(measure(demo, disk, resident, reference, cache, "real disk, O_DIRECT", compared, ratios))
    if options.emulated:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        reference = _reference(resident, demo)
        for cache in options.emulated:
            link = SlowedFiles(checkpoint, DTYPE)
            link.equalise(reference, cache)
            title = "emulated link, transfer = compute"
            rows.append(measure(demo, link, resident, reference, cache, title, compared, ratios))
    save(options.json, rows)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
