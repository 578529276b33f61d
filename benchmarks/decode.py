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
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import DTYPE, heldout_prompts, make_parser, save, widened_demo

from promoe.commands.bench.example import find_example
from promoe.commands.bench.messages import Opening, Prompt
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import System
from promoe.commands.bench.tasks import GENERATE, Reference, Task, refer
from promoe.commands.demo.comparison import compare
from promoe.commands.demo.systems import RESIDENT, SYSTEMS, to_compare
from promoe.commands.lower_bound import missed_by_answer
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


def slowed(opening: Opening, reference: Reference) -> Opening:
    """Return a checkpoint's files behind an emulated link, copied from the page cache, as no disk keeps up reliably.

    The misses of next-use eviction without prefetch take as long as computing a token.
    """
    opening = replace(opening, read_mode="page_cache", link=EmulatedLink(bandwidth_bytes_per_s=1e9))
    with closing(Served(replace(opening, system=SYSTEMS[2]))) as probe:
        config = probe.facts().scheduler
    assert config is not None, "a system of this library"
    missed = missed_by_answer(config, [answer.routing for answer in reference.answers])[1:]
    bandwidth = median(one.token_bytes for one in missed) / reference.compute_s
    return replace(opening, link=EmulatedLink(bandwidth_bytes_per_s=bandwidth))


def measure(
    title: str, opening: Opening, resident: Served, reference: Reference, systems: Sequence[System]
) -> dict[str, Any]:
    """Print the figures of all systems at one cache size, and return them."""
    table = compare(resident, reference, [replace(opening, system=system) for system in systems])
    runs, answers = table.runs(), {row.system.name: row.answers for row in table.rows}
    link, bandwidth = runs[-1].stats.link, table.bandwidth_bytes_per_s
    print(f"\n{title}, cache {table.cache}, link {link}, W {bandwidth / 1e9:.2f} GB/s")
    print(text_comparison(runs, baseline=ON_DEMAND))
    ratios = {}
    for slow, fast, wanted in RATIOS:
        ratio = paired_speedup(tpots_s(answers[slow]), tpots_s(answers[fast]))
        ratios[f"{slow} / {fast}"] = ratio
        print(f"  {slow} / {fast}: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}); wanted: {wanted}")
    for run in runs:
        if run.stats.predictor is not None:
            print(f"  {run.name}: prefetch on {run.stats.decode.prefetch_on_share:.0%} of decode layer visits")
    return {
        "title": title,
        "cache": table.cache,
        "bandwidth_bytes_per_s": bandwidth,
        "runs": {
            run.name: {"tpot_s": run.tpot_s, "bound_s": run.bound_s, "stats": run.stats.to_json()} for run in runs
        },
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
    ids = [prompt[0].tolist() for prompt in heldout_prompts(options.pairs + 1)]
    task = Task(GENERATE, [Prompt(one, options.new_tokens, pad_token_id=0) for one in ids])
    systems = (*to_compare(True, find_example().predictor), replace(SYSTEMS[3], name=RANDOM, predictor="random"))
    disk = Opening(RESIDENT, checkpoint, str(DTYPE).removeprefix("torch."), "", read_mode="direct")
    resident = Served(disk)
    rows = []
    if options.caches:
        reference = refer(resident, task)
        for cache in options.caches:
            opening = replace(disk, cache=cache)
            rows.append(measure("real disk, O_DIRECT", opening, resident, reference, systems))
    if options.emulated:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        reference = refer(resident, task)
        for cache in options.emulated:
            opening = slowed(replace(disk, cache=cache), reference)
            rows.append(measure("emulated link, transfer = compute", opening, resident, reference, systems))
    save(options.json, rows)


if __name__ == "__main__":
    main()
