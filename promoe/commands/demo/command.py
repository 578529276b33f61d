"""Tells the story of `promoe demo`: one answer, then two comparisons, behind an emulated link and on the real disk."""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from promoe.commands.bench.example import READABLE_LOSS, find_example
from promoe.commands.bench.messages import Opening, Sizes
from promoe.commands.bench.options import Emulated
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import KNOWN
from promoe.commands.bench.table import Table
from promoe.commands.bench.tasks import Reference, Task, TokensDifferError, generate_task, refer
from promoe.commands.charts.html_report import html_report
from promoe.commands.demo.comparison import compare
from promoe.commands.demo.options import Options
from promoe.commands.demo.setups import DEEPSEEK_ON_4090, RealSetup
from promoe.commands.demo.show import conditions, heading, paragraph, say, show_routing, show_sample, show_table
from promoe.commands.demo.systems import RESIDENT, SYSTEMS, to_compare
from promoe.files import check_writable, make_folder
from promoe.model.tokenizer import load_tokenizer
from promoe.runtime.sizes import check_cache
from promoe.transfer.cpu_contention import CoreWatch, Taken, without_busy_cores
from promoe.transfer.links.disk import SPARE_RAM_BYTES
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.units import format_memory, format_number, format_percent, format_seconds

# bf16 halves the bytes on disk, and its products read half the memory, also on CPUs that have no bf16 instructions.
DTYPE = "bfloat16"
# The prompt that warms up fills the slots; a few tokens make everything else ready.
WARM_UP_TOKENS = 8
# Longer answers are cut short, so that the demo takes at most four minutes where processor and disk are slow, too.
SECONDS_PER_ANSWER = 5.0


@without_busy_cores()  # said once, at the end
def run_demo(options: Options) -> bool:
    """Run the demo, and return whether all systems gave the same tokens.

    Raises:
        PromoeError: something that it needs is missing or cannot be written; before anything is measured.
    """
    started_s, watch = time.monotonic(), CoreWatch()
    demo = Demo(options)
    try:
        demo.first_look()
        demo.say_what_is_compared()
        demo.behind_link(DEEPSEEK_ON_4090)
        if not options.skip_widened:
            demo.on_disk()
    except TokensDifferError as error:
        heading("FAILED: THE OUTPUT IS NOT THE SAME")
        paragraph(str(error))
        return False
    demo.say_where()
    say(f"  The demo took {format_seconds(time.monotonic() - started_s)}.")
    _say_of_others(watch.taken())
    return True


class Demo:
    """One run of the demo. What it needs is checked and opened at once; each of its parts can be run alone.

    Raises:
        PromoeError: something that it needs is missing or cannot be written.
    """

    def __init__(self, options: Options) -> None:
        transformers.logging.disable_progress_bar()
        self.options = options
        check_cache(options.cache)
        self.example = find_example(options.model)
        self.out = Path(options.out)
        make_folder(self.out)
        check_writable(self.out / "report.html")
        self.written: list[tuple[str, Path]] = []
        self._tokenizer: Any = load_tokenizer(str(self.example.checkpoint))
        self._texts = self.example.prompts(options.prompts + 1)
        self.task = generate_task(
            self._tokenizer,
            self._texts,
            options.max_new_tokens,
            warm_up_tokens=WARM_UP_TOKENS,
            seconds=SECONDS_PER_ANSWER,
        )
        self.systems = to_compare(options.steps, self.example.predictor)
        loss = self.example.heldout_loss()
        self._readable = loss is None or loss <= READABLE_LOSS

    def first_look(self) -> None:
        """Answer once with the experts on disk, in the first seconds."""
        heading("First look: the demo model, its experts left in the checkpoint's files")
        opening = Opening(RESIDENT, self.example.checkpoint, DTYPE, self.options.cache)
        prompt = self.task.prompts[1]
        reference = refer(Served(opening), Task(self.task.name, [prompt]))
        ours = Served(replace(opening, system=KNOWN["gate"]))
        with closing(ours):
            started_s = time.monotonic()
            answer = ours.answer(prompt).generation
            seconds = time.monotonic() - started_s
            reference.verify("promoe", 0, answer)
            stats = ours.handle.stats()
            total_bytes = ours.sizes().experts_bytes
        if self._readable:
            show_sample(self._texts[1], self._tokenizer.decode(list(answer.tokens), skip_special_tokens=True))
        else:
            paragraph(
                f"The demo model's held-out loss is {self.example.heldout_loss()} nats per token: its prose is not the point, "
                "its routing is."
            )
        paragraph(
            f"{len(answer.tokens)} tokens in {format_seconds(seconds)}, the same as the unmodified model's. Of its "
            f"{format_memory(total_bytes)} of experts, RAM had slots for {format_memory(stats.cache_bytes)} "
            f"({stats.cache_slots} experts): they held {format_percent(stats.decode.hit_rate)}% of what a token needed."
        )

    def say_what_is_compared(self) -> None:
        """Print the systems, a line each."""
        if self.options.steps:
            say("", "What each idea buys, step by step; every row adds one to the row above it.")
        else:
            say("", "What promoe buys over fetching on demand (promoe demo --steps: what each idea of it buys).")
        say(*(f"  {system.name.ljust(20)}{system.meaning}" for system in self.systems))

    def behind_link(self, setup: RealSetup) -> None:
        """Compare with the experts of the demo model behind a link that is as slow, for it, as `setup`'s is."""
        heading(f"1. The demo model behind a link with the balance of {setup.name}")
        opening = Opening(RESIDENT, self.example.checkpoint, DTYPE, self.options.cache, read_mode="page_cache")
        resident = Served(opening)
        reference = refer(resident, self.task)
        token_bytes = resident.sizes().token_bytes
        link = Emulated(ratio=setup.ratio).link(token_bytes, reference.compute_s)
        paragraph(
            f"There, moving all of a token's experts takes {format_seconds(setup.transfer_s)} and computing the token "
            f"{format_seconds(setup.compute_s)}: {format_number(setup.ratio)} to 1. Here the token was measured to take "
            f"{format_seconds(reference.compute_s)}, so the link is set to {format_number(link.bandwidth_bytes_per_s / 1e6)} "
            "MB/s."
        )
        table = self._compare(resident, reference, replace(opening, link=link), "emulated-link")
        assert table.token_compute_s is not None, "this part has the unmodified model"
        ratio = token_bytes / link.bandwidth_bytes_per_s / table.token_compute_s
        imitates = (
            f"{setup.name}: transfer / compute = {format_number(setup.ratio)} if nothing were cached; in this table it is "
            f"{format_number(ratio)}"
        )
        self._present(table, replace(opening, link=link), "emulated-link", "behind an emulated link", imitates=imitates)
        decode = table.rows[-1].decode
        if not self._readable and decode is not None:
            show_routing(decode)

    def on_disk(self) -> None:
        """Compare with experts of real size, read from this machine's disk past the page cache."""
        heading(f"2. The same function with experts {self.options.repeat} times as wide, on this machine's disk")
        checkpoint = self.example.widened(self.out, self.options.repeat, getattr(torch, DTYPE))
        opening = Opening(RESIDENT, checkpoint, DTYPE, self.options.cache, read_mode="direct")
        with closing(Served(replace(opening, system=SYSTEMS[0]))) as probe:
            fits = self._fits(probe.sizes(), probe.slots_bytes(self.options.cache))
            resident = Served(opening) if fits else None
            reference = refer(probe if resident is None else resident, self.task, unmodified=fits)
        del probe
        gc.collect()
        paragraph(
            f"Every neuron of an expert is repeated {self.options.repeat} times and its output divided by as much: real "
            f"routing, real bytes. Read from {checkpoint} with O_DIRECT, so that the page cache does not flatter."
        )
        table = self._compare(resident, reference, opening, "real-disk")
        self._present(table, opening, "real-disk", "on the real disk")

    def say_where(self) -> None:
        """Print what was written."""
        heading("Written")
        width = max(len(str(path)) for _, path in self.written)
        for what, path in self.written:
            say(f"  {str(path).ljust(width)}  {what}")

    def _compare(self, resident: Served | None, reference: Reference, opening: Opening, name: str) -> Table:
        openings = [replace(opening, system=system) for system in self.systems]
        return compare(resident, reference, openings, self._timeline(name))

    def _timeline(self, name: str) -> Path:
        return check_writable(self.out / f"{name}-timeline.json")

    def _present(self, table: Table, opening: Opening, name: str, where: str, **more: str) -> None:
        found = conditions(table, opening) | more
        show_table(table, found)
        page = check_writable(self.out / f"{name}-report.html")
        html_report(table.runs(), page, f"promoe demo: {where}", found, baseline=SYSTEMS[0].name)
        self.written.append((f"report, experts {where}", page))
        what = f"timeline of “{self.systems[-1].name}”; open it at ui.perfetto.dev"
        self.written.append((what, self._timeline(name)))

    def _fits(self, sizes: Sizes, slots_bytes: int) -> bool:
        """Return whether the whole model and the slots of every system fit into free RAM, and say so if not."""
        free_bytes = free_ram_bytes()
        needed_bytes = sizes.experts_bytes + len(self.systems) * slots_bytes + SPARE_RAM_BYTES
        if free_bytes is None or needed_bytes <= free_bytes:
            return True
        paragraph(
            f"All experts in RAM beside every system's slots would take {format_memory(needed_bytes)}; "
            f"{format_memory(free_bytes)} are free. So that row is left out."
        )
        return False


def _say_of_others(taken: Taken | None) -> None:
    """Say if other programs computed on the same cores: everything was slower then, the emulated link included."""
    if taken is not None and taken.much_by_others:
        say("")
        paragraph(
            f"Note: other processes kept {taken.by_others:.2f} of this machine's {taken.cores} cores busy. The demo took "
            "longer beside them, and its figures are not what the machine can do. To see that, stop them and run it again."
        )
