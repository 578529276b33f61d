"""Simulated beside real: is a virtual clock to be believed? The widened demo model, on the real disk or behind a link.

    python benchmarks/simulated.py [--caches 12.5% 25% 50%] [--emulated 25%] [--pairs 3] [--new-tokens 24] [--json FILE]

Per cache rate every system answers the same held-out prompts, interleaved, as in `benchmarks/decode.py`; then the routing of
these answers runs through the simulator with each system's own scheduler configuration. It is told what was measured in the
same run without any fetching: time of a layer's experts, time of everything else where all experts have a slot, what a group
of experts by itself costs, the bandwidth; and, for a disk, how much computing and reading lose to each other. Wanted: TPOT
within 15%.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save
from decode import equalised, on_fewer_cores
from transformers import PreTrainedModel

from promoe.commands.bench.messages import Opening
from promoe.commands.bench.served import Served
from promoe.commands.bench.tasks import Reference, Task, refer
from promoe.commands.contention import measure_contention
from promoe.commands.demo.command import DTYPE, Demo
from promoe.commands.demo.comparison import compare
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import RESIDENT, SYSTEMS
from promoe.commands.simulate.answers import simulate_answers
from promoe.experts.experts_forward import run_groups
from promoe.experts.moe_layers import MoELayer
from promoe.transfer.link_timetable import Wire
from promoe.transfer.links import FileLink
from promoe.units import aligned, format_ms, format_share

WITHOUT_PREFETCH = SYSTEMS[:3]
GROUP_ROUNDS, GROUP_SLEEP_S = 20, 0.002


def experts_share(model: PreTrainedModel, task: Task, layers: Sequence[MoELayer]) -> float:
    """The part of a decode step that the experts' forwards take."""
    spent_s, started_s = 0.0, 0.0

    def begin(*_: Any) -> None:
        nonlocal started_s
        started_s = time.perf_counter()

    def end(*_: Any) -> None:
        nonlocal spent_s
        spent_s += time.perf_counter() - started_s

    ids = torch.tensor([task.prompts[1].ids])
    with torch.inference_mode():
        cache = model(ids).past_key_values
        hooks = [layer.experts.register_forward_pre_hook(begin) for layer in layers]
        hooks += [layer.experts.register_forward_hook(end) for layer in layers]
        shares = []
        for _ in range(2 * task.prompts[1].new_tokens):
            spent_s, from_s = 0.0, time.perf_counter()
            cache = model(ids[:, -1:], past_key_values=cache).past_key_values
            shares.append(spent_s / (time.perf_counter() - from_s))
        for hook in hooks:
            hook.remove()
    return median(shares)


def cached_tpot_s(opening: Opening, task: Task) -> float:
    """With a slot for every expert: the unmodified model's time and what planning costs. The first answer fills the slots."""
    with closing(Served(replace(opening, system=WITHOUT_PREFETCH[-1], cache="100%"))) as served:
        answers = [served.answer(prompt).generation for prompt in task.prompts]
    return median(answer.tpot_s for answer in answers[1:])


def group_cost_s(layers: Sequence[MoELayer], num_experts: int) -> float:
    """By how much a layer's time grows per group if its experts come one by one, after a short sleep each."""
    draw, found = torch.Generator().manual_seed(0), []
    for layer in list(layers) * GROUP_ROUNDS:
        chosen = torch.randperm(layer.num_experts, generator=draw)[:num_experts][None]
        names = [path for tensor in layer.tensors for path in tensor.paths]
        rows = {i: {name: layer.experts.get_parameter(name)[i] for name in names} for i in chosen[0].tolist()}
        shape = layer.stacked_shapes[0][1]
        hidden = torch.randn(1, shape[-1], generator=draw).bfloat16()
        weights = torch.rand(1, num_experts, generator=draw).bfloat16()

        def one_by_one(rows: Any = rows) -> Any:
            for expert_idx, row in rows.items():
                time.sleep(GROUP_SLEEP_S)
                yield {expert_idx: row}

        times = []
        for groups in ((rows,), one_by_one()):
            start_s = time.perf_counter()
            with torch.inference_mode():
                run_groups(layer, hidden, chosen, weights, groups, chosen.tolist())
            times.append(time.perf_counter() - start_s)
        found.append((times[1] - times[0]) / num_experts - GROUP_SLEEP_S)
    return median(found)


def measure(opening: Opening, resident: Served, reference: Reference, title: str) -> list[dict[str, Any]]:
    openings = [replace(opening, system=system) for system in WITHOUT_PREFETCH]
    task, layers, cache = reference.task, resident.layers(), opening.cache
    table = compare(resident, reference, openings)
    compute_s = table.token_compute_s
    assert compute_s is not None
    share = experts_share(resident.model, task, layers)
    visits = sum(len(tokens[0]) for _, tokens in reference.answers[-1].routing[-1].visits)
    expert_s = compute_s * share / visits
    cached_s = cached_tpot_s(opening, task)
    layer_s = (cached_s - compute_s * share) / len(layers)
    group_s = group_cost_s(layers, visits // len(layers))
    bandwidth, slowdown = table.bandwidth_bytes_per_s, 1.0
    with closing(Served(openings[0])) as probed:
        engine = probed.handle.runtime.engine
        if isinstance(engine.link, FileLink):
            ids = task.prompts[1].ids
            contention = measure_contention(resident.model, ids, engine.store, engine.link.mode, engine.link.workers)
            bandwidth, slowdown = contention.bandwidth_bytes_per_s, contention.slowdown
    print(
        f"\n{title}, cache {cache}: C {format_ms(compute_s)} ms, {format_share(share)} of it experts, "
        f"{format_ms(cached_s)} with all of them in slots, a group by itself {format_ms(group_s)} more, "
        f"W {table.bandwidth_bytes_per_s / 1e9:.2f} GB/s at best, {bandwidth / 1e9:.2f} while computing, which takes "
        f"{slowdown:.2f} times as long then"
    )
    found = []
    for one in openings:
        system = one.system
        real_s = next(run.tpot_s for run in table.runs() if run.name == system.name)
        with closing(Served(one)) as served:
            config = served.facts().scheduler
        assert config is not None, "a system of this library"
        wire = Wire(bandwidth, 0.0)
        routing = [answer.routing for answer in reference.answers]
        answers = simulate_answers(
            config,
            routing,
            wire,
            lambda *_: (layer_s, expert_s),
            slowdown,
            group_s,
            stream=False,
        )
        tpot_s = answers.tpot_s
        found.append({"setting": title, "cache": cache, "system": system.name, "real_s": real_s, "simulated_s": tpot_s})
    rows = [("", "real", "simulated", "simulated / real")]
    for row in found:
        ratio = row["simulated_s"] / row["real_s"]
        rows.append((row["system"], format_ms(row["real_s"]), format_ms(row["simulated_s"]), f"{ratio:.2f}"))
    print("\n".join(aligned(rows)), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="*", default=["12.5%", "25%", "50%"], help="real disk")
    parser.add_argument("--emulated", nargs="*", default=["25%"], help="emulated link, transfer = compute")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/simulated.json"))
    options = parser.parse_args()
    demo = Demo(Options(prompts=options.pairs, max_new_tokens=options.new_tokens, steps=True))
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, torch.bfloat16)
    disk, found = Opening(RESIDENT, checkpoint, DTYPE, "", read_mode="direct"), []
    resident = Served(disk)
    if options.caches:
        reference = refer(resident, demo.task)
        for cache in options.caches:
            found += measure(replace(disk, cache=cache), resident, reference, "real disk, O_DIRECT")
    if options.emulated:
        reference = on_fewer_cores(resident, demo)
        for cache in options.emulated:
            link = equalised(replace(disk, cache=cache), reference)
            found += measure(link, resident, reference, "emulated link, transfer = compute")
    save(options.json, found)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
