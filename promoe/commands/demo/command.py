"""Runs the demo: the demo model behind an emulated link, then with wide experts on the real disk."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from promoe.commands.charts.html_report import html_report
from promoe.commands.demo.comparison import Reference, Result, Task, TokensDifferError, compare, record, verify
from promoe.commands.demo.example import READABLE_LOSS, Example, find_example
from promoe.commands.demo.options import Options
from promoe.commands.demo.setups import DEEPSEEK_ON_4090, RealSetup, emulate
from promoe.commands.demo.show import (
    conditions,
    heading,
    paragraph,
    say,
    show_conditions,
    show_result,
    show_routing,
    show_sample,
)
from promoe.commands.demo.systems import SYSTEMS, BehindLink, OnDisk, load_stock, to_compare
from promoe.commands.measure import Generation
from promoe.config import PromoeConfig
from promoe.files import check_writable, make_folder
from promoe.model.tokenizer import load_tokenizer, prompt_inputs
from promoe.runtime.loading import from_pretrained
from promoe.runtime.sizes import check_cache, plan_pools
from promoe.transfer.cpu_contention import CoreWatch, taken_now
from promoe.transfer.links.file import SPARE_RAM_BYTES
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.units import format_memory, format_number, format_percent, format_seconds

if TYPE_CHECKING:
    from promoe.experts.moe_layers import MoELayer

# bf16 halves the bytes on disk, and its products read half the memory, also on CPUs that have no bf16 instructions.
DTYPE = torch.bfloat16


def run_demo(options: Options) -> bool:
    """Run both parts; says whether all systems gave the same tokens.

    Raises:
        PromoeError: something that it needs is missing or cannot be written; before anything is measured.
    """
    started_s = time.monotonic()
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
    return True


class Demo:
    """One run of the demo: what it needs is checked and opened at once, its two parts can be run alone."""

    def __init__(self, options: Options) -> None:
        transformers.logging.disable_progress_bar()
        self.options = options
        check_cache(options.cache)
        self.example: Example = find_example(options.model)
        self.out = _folder(options.out)
        self.written: list[tuple[str, Path]] = []
        self._tokenizer = load_tokenizer(str(self.example.checkpoint))
        self._prompts = self.example.prompts(options.prompts + 1)
        self.task = self._make_task()
        self.systems = to_compare(options.steps, self.example.predictor)
        _warn_of_others()

    def first_look(self) -> None:
        """One answer with the experts on disk, in the first seconds."""
        heading("First look: the demo model, its experts left in the checkpoint's files")
        checkpoint, inputs = self.example.checkpoint, self.task.prompts[0]
        expected = self.task.run(load_stock(checkpoint, DTYPE), inputs)
        config = PromoeConfig(bypass=False)  # slots, also where there is room for all experts
        model: Any = from_pretrained(checkpoint, cache=self.options.cache, dtype=DTYPE, config=config)
        with closing(model.promoe):
            started_s = time.monotonic()
            answer = self.task.run(model, inputs)
            seconds = time.monotonic() - started_s
            verify("promoe", 1, answer, expected)
            stats = model.promoe.stats()
        self._sample(answer)
        total_bytes = sum(count * nbytes for count, nbytes in zip(stats.num_experts, stats.expert_bytes, strict=True))
        paragraph(
            f"{len(answer.tokens)} tokens in {format_seconds(seconds)}, the same as the unmodified model's. Of its "
            f"{format_memory(total_bytes)} of experts, RAM had slots for {format_memory(stats.cache_bytes)} "
            f"({stats.cache_slots} experts): they held {format_percent(stats.decode.hit_rate)}% of what a token needed."
        )

    def say_what_is_compared(self) -> None:
        """Print the systems, a line each."""
        say()
        if self.options.steps:
            say("What each idea buys, step by step; every row adds one to the row above it.")
        else:
            say("What promoe buys over fetching on demand (promoe demo --steps: what each idea of it buys).")
        for system in self.systems:
            say(f"  {system.name.ljust(20)}{system.meaning}")

    def behind_link(self, setup: RealSetup) -> None:
        """Part 1: the demo model in RAM, its experts behind a link as slow, for it, as `setup`'s is."""
        heading(f"1. The demo model behind a link with the balance of {setup.name}")
        watch = CoreWatch()
        source = BehindLink(self.example.checkpoint, DTYPE)
        model = source.resident()
        reference = record(model, self.task)
        source.link = emulate(setup, reference.token_bytes, reference.compute_s)
        paragraph(
            f"There, moving all of a token's experts takes {format_seconds(setup.transfer_s)} and computing the token "
            f"{format_seconds(setup.compute_s)}: {format_number(setup.ratio)} to 1. Here the token was measured to take "
            f"{format_seconds(reference.compute_s)}, so the link is set to "
            f"{format_number(source.link.bandwidth_bytes_per_s / 1e6)} MB/s."
        )
        timeline = self._path("emulated-link-timeline.json")
        result = compare(source, model, reference, self.task, self.options.cache, timeline, self.systems)
        assert result.compute_s is not None, "this part has the unmodified model"
        transfer_s = reference.token_bytes / source.link.bandwidth_bytes_per_s
        setting = {
            "imitates": f"{setup.name}: transfer / compute = {format_number(setup.ratio)} if nothing were cached; in this "
            f"table it is {format_number(transfer_s / result.compute_s)}"
        }
        setting |= _cores_since(watch)
        self._present(result, reference, self.example.checkpoint, setting, "emulated-link", "behind an emulated link")

    def on_disk(self) -> None:
        """Part 2: experts of real size, read from this machine's disk past the page cache."""
        heading(f"2. The same function with experts {self.options.repeat} times as wide, on this machine's disk")
        checkpoint = self.example.widened(self.out, self.options.repeat, DTYPE)
        watch = CoreWatch()
        source = OnDisk(checkpoint, DTYPE)
        probe: Any = source.patched(SYSTEMS[0], self.options.cache)
        with closing(probe.promoe):
            layers: Sequence[MoELayer] = probe.promoe.runtime.layers
            model = source.resident() if self._fits(layers) else None
            reference = record(probe, self.task, layers) if model is None else record(model, self.task)
        del probe
        gc.collect()
        paragraph(
            f"Every neuron of an expert is repeated {self.options.repeat} times and its output divided by as much: real "
            f"routing, real bytes. Read from {checkpoint} with O_DIRECT, so that the page cache does not flatter."
        )
        timeline = self._path("real-disk-timeline.json")
        result = compare(source, model, reference, self.task, self.options.cache, timeline, self.systems)
        self._present(result, reference, checkpoint, _cores_since(watch), "real-disk", "on the real disk")

    def say_where(self) -> None:
        """Print what was written."""
        heading("Written")
        width = max(len(str(path)) for _, path in self.written)
        for what, path in self.written:
            say(f"  {str(path).ljust(width)}  {what}")

    def _present(
        self, result: Result, reference: Reference, checkpoint: Path, setting: Mapping[str, str], name: str, where: str
    ) -> None:
        found = conditions(checkpoint, DTYPE, reference.layers, result, self.task, self.options) | dict(setting)
        show_result(result, reference)
        say()
        show_conditions(found)
        report = html_report(
            result.runs, self._path(f"{name}-report.html"), f"promoe demo: {where}", found, baseline=SYSTEMS[0].name
        )
        self.written.append((f"report, experts {where}", report))
        self.written.append(
            (f"timeline of “{self.systems[-1].name}”; open it at ui.perfetto.dev", self.out / f"{name}-timeline.json")
        )
        if name == "emulated-link" and not self._readable():
            say()
            show_routing(result.runs[-1].stats.decode)

    def _sample(self, answer: Generation) -> None:
        loss = self.example.heldout_loss()
        if not self._readable():
            paragraph(
                f"The demo model's held-out loss is {loss} nats per token: its prose is not the point, its routing is."
            )
            return
        say()
        text = self._tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
        show_sample(self._prompts[1], str(text))

    def _readable(self) -> bool:
        loss = self.example.heldout_loss()
        return loss is None or loss <= READABLE_LOSS

    def _make_task(self) -> Task:
        inputs = [prompt_inputs(self._tokenizer, prompt) for prompt in self._prompts]
        pad = self._tokenizer.pad_token_id
        return Task(
            inputs[0], inputs[1:], self.options.max_new_tokens, self._tokenizer.eos_token_id if pad is None else pad
        )

    def _fits(self, layers: Sequence[MoELayer]) -> bool:
        """Whether the whole model and the slots of every system fit into free RAM."""
        free_bytes = free_ram_bytes()
        layouts, counts = [layer.layout for layer in layers], [layer.num_experts for layer in layers]
        slots_bytes = len(self.systems) * sum(plan.nbytes for plan in plan_pools(self.options.cache, layouts, counts))
        total_bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in layers)
        needed_bytes = total_bytes + slots_bytes + SPARE_RAM_BYTES
        if free_bytes is None or needed_bytes <= free_bytes:
            return True
        paragraph(
            f"All experts in RAM beside every system's slots would take {format_memory(needed_bytes)}; "
            f"{format_memory(free_bytes)} are free. So that row is left out."
        )
        return False

    def _path(self, name: str) -> Path:
        return check_writable(self.out / name)


def _warn_of_others() -> None:
    """Say so where other programs compute on the same cores: all is slower then, the emulated link with it."""
    taken = taken_now()
    if taken is not None and taken.much_by_others:
        paragraph(
            f"Note: other processes keep {taken.by_others:.2f} of this machine's {taken.cores} cores busy. The demo "
            "takes longer beside them, and its figures are not what the machine can do. Stop them, or go on all the same."
        )
        say()


def _cores_since(watch: CoreWatch) -> dict[str, str]:
    """What others took of the cores, for the conditions; nothing where the system does not say."""
    taken = watch.taken()
    return {} if taken is None else {"cores": taken.describe()}


def _folder(path: str) -> Path:
    folder = Path(path)
    make_folder(folder)
    check_writable(folder / "report.html")
    return folder
