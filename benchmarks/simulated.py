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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save
from decode import SlowedFiles
from transformers import PreTrainedModel

from promoe.commands.contention import measure_contention
from promoe.commands.demo.command import DTYPE, Demo
from promoe.commands.demo.comparison import Reference, Task, compare, record
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import SYSTEMS, OnDisk, System
from promoe.commands.simulate.answers import simulate_answers
from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer
from promoe.scheduler import SchedulerConfig
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

    ids = task.prompts[0]["input_ids"]
    with torch.inference_mode():
        cache = model(ids).past_key_values
        hooks = [layer.experts.register_forward_pre_hook(begin) for layer in layers]
        hooks += [layer.experts.register_forward_hook(end) for layer in layers]
        shares = []
        for _ in range(2 * task.new_tokens):
            spent_s, from_s = 0.0, time.perf_counter()
            cache = model(ids[:, -1:], past_key_values=cache).past_key_values
            shares.append(spent_s / (time.perf_counter() - from_s))
        for hook in hooks:
            hook.remove()
    return median(shares)


def cached_tpot_s(source: Any, task: Task) -> float:
    """With a slot for every expert: the unmodified model's time and what planning costs. The first answer fills the slots."""
    model = source.patched(WITHOUT_PREFETCH[-1], "100%")
    with closing(model.promoe):
        task.run(model, task.warm_up)
        return median(task.run(model, prompt).tpot_s for prompt in task.prompts)


def group_cost_s(layers: Sequence[MoELayer], num_experts: int) -> float:
    """By how much a layer's time grows per group if its experts come one by one, after a short sleep each."""
    draw, found = torch.Generator().manual_seed(0), []
    for layer in list(layers) * GROUP_ROUNDS:
        chosen = torch.randperm(layer.num_experts, generator=draw)[:num_experts][None]
        names = [path for tensor in layer.tensors for path in tensor.paths]
        rows = {i: {name: layer.experts.get_parameter(name)[i] for name in names} for i in chosen[0].tolist()}
        shape = layer.stacked_shapes[0][1]
        hidden = torch.randn(1, shape[-1], generator=draw).to(DTYPE)
        weights = torch.rand(1, num_experts, generator=draw).to(DTYPE)

        def one_by_one(rows: Any = rows) -> Any:
            for expert_idx, row in rows.items():
                time.sleep(GROUP_SLEEP_S)
                yield {expert_idx: row}

        times = []
        for groups in ((rows,), one_by_one()):
            start_s = time.perf_counter()
            with torch.inference_mode():
                LayerCall(layer, hidden, chosen, weights, chosen.tolist()).run_groups(groups)
            times.append(time.perf_counter() - start_s)
        found.append((times[1] - times[0]) / num_experts - GROUP_SLEEP_S)
    return median(found)


def config_of(source: Any, system: System, cache: str) -> SchedulerConfig:
    model = source.patched(system, cache)
    config: SchedulerConfig = model.promoe.runtime.engine.scheduler.config
    model.promoe.close()
    return config


def measure(
    demo: Demo, source: Any, resident: Any, reference: Reference, cache: str, title: str
) -> list[dict[str, Any]]:
    result = compare(
        source, resident, reference, demo.task, cache, demo.out / "simulated-timeline.json", WITHOUT_PREFETCH
    )
    assert result.compute_s is not None
    share = experts_share(resident, demo.task, reference.layers)
    visits = sum(len(tokens[0]) for _, tokens in reference.routing[-1][-1].visits)
    expert_s = result.compute_s * share / visits
    cached_s = cached_tpot_s(source, demo.task)
    layer_s = (cached_s - result.compute_s * share) / len(reference.layers)
    group_s = group_cost_s(reference.layers, visits // len(reference.layers))
    bandwidth, slowdown = result.bandwidth_bytes_per_s, 1.0
    probed = source.patched(WITHOUT_PREFETCH[0], cache)
    engine = probed.promoe.runtime.engine
    if isinstance(engine.link, FileLink):
        ids = demo.task.prompts[0]["input_ids"][0].tolist()
        found = measure_contention(resident, ids, engine.store, engine.link.mode, engine.link.workers)
        bandwidth, slowdown = found.bandwidth_bytes_per_s, found.slowdown
    probed.promoe.close()
    print(
        f"\n{title}, cache {cache}: C {format_ms(result.compute_s)} ms, {format_share(share)} of it experts, "
        f"{format_ms(cached_s)} with all of them in slots, a group by itself {format_ms(group_s)} more, "
        f"W {result.bandwidth_bytes_per_s / 1e9:.2f} GB/s at best, {bandwidth / 1e9:.2f} while computing, which takes "
        f"{slowdown:.2f} times as long then"
    )
    found = []
    for system in WITHOUT_PREFETCH:
        real_s = next(run.tpot_s for run in result.runs if run.name == system.name)
        config = config_of(source, system, cache)
        wire = Wire(bandwidth, 0.0)
        answers = simulate_answers(
            config, reference.routing, wire, lambda *_: (layer_s, expert_s), slowdown, group_s, stream=False
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
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, DTYPE)
    disk, found = OnDisk(checkpoint, DTYPE), []
    resident = disk.resident()
    if options.caches:
        reference = record(resident, demo.task)
        for cache in options.caches:
            found += measure(demo, disk, resident, reference, cache, "real disk, O_DIRECT")
    if options.emulated:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        reference = record(resident, demo.task)
        for cache in options.emulated:
            link = SlowedFiles(checkpoint, DTYPE)
            link.equalise(reference, cache)
            found += measure(demo, link, resident, reference, cache, "emulated link, transfer = compute")
    save(options.json, found)
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
