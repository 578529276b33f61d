"""What a plan chooses for many prompts, beside a measured grid of sequences at once and of splits of the memory.

    python benchmarks/batch_grid.py [--link-gb-s 0.5] [--at-once 16 32 64 128] [--kv 0.125 0.25 0.5] [--json FILE]

Slots and KV cache share a part of what all experts take. Prints a row for each number of sequences at once and share of the
KV cache: tokens per second, planned and measured. Then the same of what the plan chooses, and its speed over the best row's.
Last, for each split, from how many sequences at once on loading takes no longer than computing (Klotski's inequality 7),
planned and measured. Takes 10 minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from common import heldout_prompts, make_parser, open_slots, print_table, save, widened_demo

import promoe
from promoe.commands.bench.many import cut_up, lengths
from promoe.commands.plan.many_prompts import measure_machine
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.sizes import cache_argument
from promoe.commands.plan.throughput import BatchMachine, BatchModel, BatchWork, Setting, Wanted, workspace_bytes
from promoe.units import format_megabytes, format_number, format_percent


@dataclass(frozen=True)
class Row:
    """A setting, and what it gave.

    Attributes:
        planned: tokens per second.
        measured: tokens per second.
        link_s: seconds that the moved bytes take at the link's speed.
        compute_s: seconds in which the model did not wait for experts.
        hidden: whether the link takes no longer than computing: planned, measured.
    """

    setting: Setting
    planned: float
    measured: float
    link_s: float
    compute_s: float
    hidden: tuple[bool, bool]

    def cells(self, model: BatchModel, name: str = "") -> list[str]:
        """Return the row of a table."""
        setting = self.setting
        return [
            name,
            setting.kernels,
            str(setting.at_once),
            format_megabytes(model.kv_bytes(setting.kv_tokens)),
            format_percent(setting.rate),
            format_number(self.planned),
            format_number(self.measured),
            format_number(self.planned / self.measured),
            format_percent(self.link_s / self.compute_s),
        ]


class Measured:
    """A checkpoint that answers the same prompts with several settings.

    Args:
        checkpoint: its folder.
        prompts: token ids of each.
        new_tokens: of each answer.
        link_bytes_per_s: of an emulated link; None: the disk.
    """

    def __init__(
        self, checkpoint: Path, prompts: Sequence[Sequence[int]], new_tokens: int, link_bytes_per_s: float | None
    ) -> None:
        self._checkpoint, self._prompts, self._new_tokens = checkpoint, prompts, new_tokens
        self._link_bytes_per_s = link_bytes_per_s
        sizes = [len(ids) for ids in prompts]
        work = BatchWork(len(prompts), sum(sizes) / len(sizes), new_tokens, max(sizes) + new_tokens)
        if link_bytes_per_s is not None:
            # Where links are slower, copies need no core; here, keeping the time needs one.
            torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        read = read_model(str(checkpoint))
        assert read.store is not None
        with closing(read.store):
            # In memory for half of the experts their files do not fit, so that they are read past the page cache.
            machine = measure_machine(read, read.sizes.slots_bytes // 2)
        self.model = BatchModel(read.sizes, self._behind_link(machine), work)

    def _behind_link(self, machine: BatchMachine) -> BatchMachine:
        if (speed := self._link_bytes_per_s) is None:
            return machine
        # A slower link takes less from computing, in proportion.
        slowdown = 1 + (machine.slowdown - 1) * min(1.0, speed / machine.bytes_per_s)
        return replace(machine, bytes_per_s=min(speed, machine.bytes_per_s), slowdown=slowdown)

    def __call__(self, setting: Setting) -> Row:
        """Answer the prompts."""
        speed = self._link_bytes_per_s
        link = None if speed is None else promoe.EmulatedLink(speed)
        model = open_slots(self._checkpoint, cache_argument(setting.rate), link=link, kernels=setting.kernels)
        model.generation_config.eos_token_id = None
        prompts = [promoe.BatchPrompt(ids, self._new_tokens) for ids in self._prompts]
        sizes = {name: getattr(setting, name) for name in ("at_once", "step_tokens", "kv_tokens")}
        try:
            list(promoe.generate_batch(model, prompts[:2], **sizes))  # the first products allocate and compile
            model.promoe.reset_stats()
            start_s = time.perf_counter()
            tokens = sum(len(answer.tokens) for answer in promoe.generate_batch(model, prompts, **sizes))
            took_s = time.perf_counter() - start_s
            total = model.promoe.stats().total
        finally:
            model.promoe.close()
        assert tokens == len(prompts) * self._new_tokens, tokens
        expected = self.model.expected(setting)
        link_s, compute_s = total.bytes_total / self.model.machine.bytes_per_s, took_s - total.stall_s
        hidden = expected.spent.link_s <= expected.spent.compute_s, link_s <= compute_s
        return Row(setting, expected.tokens_per_s, tokens / took_s, link_s, compute_s, hidden)


def grid(
    measured: Measured,
    memory_bytes: int,
    share_bytes: int,
    at_once: Sequence[int],
    kv: Sequence[float],
    step_tokens: int,
    kernels: tuple[str, ...],
) -> Iterator[Row]:
    """Yield a row for each setting that fits: shares `kv` of `share_bytes` are the KV cache's."""
    model = measured.model
    for number in at_once:
        for share in kv:
            kv_tokens = int(share * share_bytes / model.kv_bytes(1))
            wanted = Wanted(at_once=number, kv_tokens=kv_tokens, step_tokens=step_tokens, kernels=kernels)
            for setting in model.settings(memory_bytes, wanted):
                yield measured(setting)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument(
        "--width", type=int, default=32, help="experts are so many times the demo model's (default: 32)"
    )
    parser.add_argument("--link-gb-s", type=float, help="emulate a link of that many GB/s (default: the disk)")
    parser.add_argument(
        "--memory", type=float, default=0.15, help="slots and KV cache over all experts (default: 0.15)"
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 32, 64, 128], help="sequences at once")
    parser.add_argument("--kv", type=float, nargs="+", default=[0.125, 0.25, 0.5], help="shares of it for the KV cache")
    parser.add_argument("--step-tokens", type=int, default=512, help="most tokens of a step in the grid (default: 512)")
    parser.add_argument("--kernels", nargs="+", default=["exact"], help="exact, fast, or both (default: exact)")
    parser.add_argument("--prompts", type=int, default=128, help="how many (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer (default: 16)")
    options = parser.parse_args(arguments)
    text = torch.cat([ids[0] for ids in heldout_prompts(24)]).tolist()
    prompts = cut_up(text, lengths("mtbench", options.prompts))
    speed = None if options.link_gb_s is None else 1e9 * options.link_gb_s
    measured = Measured(widened_demo(options.width), prompts, options.new_tokens, speed)
    model = measured.model
    share_bytes = int(options.memory * model.sizes.slots_bytes)
    memory_bytes = model.sizes.other_bytes + workspace_bytes(options.step_tokens, 0) + share_bytes
    head = [
        "",
        "kernels",
        "at once",
        "KV, MB",
        "slots, %",
        "planned",
        "measured",
        "planned / measured",
        "link / computing, %",
    ]
    table = [head]
    rows = []
    kernels = tuple(options.kernels)
    for row in grid(measured, memory_bytes, share_bytes, options.at_once, options.kv, options.step_tokens, kernels):
        rows.append(row)
        table.append(row.cells(model))
        print(*table[-1], file=sys.stderr)
    chosen = model.best(memory_bytes, Wanted(kernels=kernels))
    assert chosen is not None, "nothing fits"
    found = measured(chosen.setting)
    best = max(row.measured for row in rows)
    table.append(found.cells(model, "chosen"))
    print_table(table)
    print(f"\nchosen over the best of the grid: {found.measured / best:.2f}")
    for rate in sorted({row.setting.rate for row in rows}, reverse=True):
        some = [row for row in rows if row.setting.rate == rate]
        first = [next((row.setting.at_once for row in some if row.hidden[idx]), None) for idx in (0, 1)]
        print(
            f"slots {rate:.1%}: loading takes no longer than computing from {first[0]} at once on (measured: {first[1]})"
        )
    save(
        options.json,
        {
            "arguments": list(arguments),
            "rows": [asdict(row) for row in rows],
            "chosen": asdict(found),
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
