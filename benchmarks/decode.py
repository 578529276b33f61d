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
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save

from promoe.commands.bench.messages import Opening
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import System
from promoe.commands.bench.tasks import Reference, refer
from promoe.commands.demo.command import DTYPE, Demo
from promoe.commands.demo.comparison import compare
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import RESIDENT, SYSTEMS, to_compare
from promoe.commands.lower_bound import missed_by_answer
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
    opening: Opening,
    resident: Served,
    reference: Reference,
    title: str,
    compared: tuple[System, ...],
    ratios: Sequence[tuple[str, str, str]],
) -> dict[str, Any]:
    """All systems at one cache rate; printed, and returned for the JSON."""
    table = compare(resident, reference, [replace(opening, system=system) for system in compared])
    runs = table.runs()
    print(f"\n{title}, cache {table.cache}, link {runs[-1].stats.link}, W {table.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
    print(text_comparison(runs, baseline=SYSTEMS[0].name))
    row: dict[str, Any] = {
        "title": title,
        "cache": table.cache,
        "bandwidth_bytes_per_s": table.bandwidth_bytes_per_s,
        "runs": {
            run.name: {"tpot_s": run.tpot_s, "bound_s": run.bound_s, "stats": run.stats.to_json()} for run in runs
        },
        "ratios": {},
    }
    answers = {row.system.name: row.answers for row in table.rows}
    for slow, fast, wanted in ratios:
        ratio = paired_speedup(tpots_s(answers[slow]), tpots_s(answers[fast]))
        row["ratios"][f"{slow} / {fast}"] = ratio
        print(
            f"  {slow} / {fast}: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}){wanted and f'; wanted: {wanted}'}"
        )
    for run in runs:
        if run.stats.predictor is not None:
            print(f"  {run.name}: prefetch on {run.stats.decode.prefetch_on_share:.0%} of decode layer visits")
    return row


def systems(demo: Demo) -> tuple[System, ...]:
    """The demo's, its predictor included, and one with useless predictions."""
    return (*demo.systems, replace(SYSTEMS[3], name=RANDOM, predictor="random"))


def limited(demo: Demo, shares: Sequence[float]) -> tuple[System, ...]:
    """Without prefetch, and each kind of it under these limits of waste."""
    return (
        SYSTEMS[0],
        SYSTEMS[2],
        *(
            replace(
                system,
                name=f"{system.name}, {share:.1%}",
                config=replace(system.config, waste_share=share),
            )
            for system in demo.systems[3:]
            for share in shares
        ),
    )


def equalised(opening: Opening, reference: Reference) -> Opening:
    """Let the misses of next-use eviction without prefetch take as long as computing a token.

    Files come over an emulated link, copied from the page cache, as no disk keeps up reliably.
    """
    opening = replace(opening, read_mode="page_cache", link=EmulatedLink(bandwidth_bytes_per_s=1e9))
    with closing(Served(replace(opening, system=SYSTEMS[2]))) as probe:
        config = probe.facts().scheduler
    assert config is not None, "a system of this library"
    missed = missed_by_answer(config, [answer.routing for answer in reference.answers])[1:]
    bandwidth = median(one.token_bytes for one in missed) / reference.compute_s
    return replace(opening, link=EmulatedLink(bandwidth_bytes_per_s=bandwidth))


def on_fewer_cores(resident: Served, demo: Demo) -> Reference:
    """The unmodified model's answers with one thread less: copies need a core."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    return refer(resident, demo.task)


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
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, torch.bfloat16)
    disk = Opening(RESIDENT, checkpoint, DTYPE, "", read_mode="direct")
    resident = Served(disk)
    print(f"{options.pairs} prompts x {options.new_tokens} tokens")
    if options.caches:
        reference = refer(resident, demo.task)
        print(f"\n{torch.get_num_threads()} threads")
        for cache in options.caches:
            opening = replace(disk, cache=cache)
            rows.append(measure(opening, resident, reference, "real disk, O_DIRECT", compared, ratios))
    if options.emulated:
        reference = on_fewer_cores(resident, demo)
        print(f"\n{torch.get_num_threads()} threads")
        for cache in options.emulated:
            link = equalised(replace(disk, cache=cache), reference)
            rows.append(measure(link, resident, reference, "emulated link, transfer = compute", compared, ratios))
    save(options.json, rows)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
