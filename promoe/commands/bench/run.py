"""Runs `promoe bench`: opens the unmodified model, lets it answer, and measures each cache size against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tqdm import tqdm

from promoe.commands.bench.options import Options
from promoe.commands.bench.process import Worker, WorkerError
from promoe.commands.bench.results import Report, Table
from promoe.commands.bench.round import Reference, Round
from promoe.commands.bench.systems import KNOWN, RESIDENT, System, find_systems
from promoe.commands.bench.tasks import Task, make_tasks
from promoe.commands.bench.worker import Contending, Opening, Preparing, Reader, Sizes
from promoe.commands.contention import SECONDS as CONTENTION_SECONDS
from promoe.commands.contention import Contention
from promoe.commands.demo.example import find_example
from promoe.commands.lower_bound import link_bandwidth
from promoe.commands.measure import tpots_s
from promoe.errors import ConfigError
from promoe.model.opening import open_without_experts
from promoe.runtime.sizes import fixed_bytes
from promoe.transfer.control_groups import MemoryGroup, NoControlGroupError, memory_groups
from promoe.transfer.links import EmulatedLink, FileLink
from promoe.transfer.links.file import SPARE_RAM_BYTES
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.probe import ProbeMode
from promoe.units import format_memory, format_number

# A program for a product of one shape, in oneDNN's cache and in ATen's before it; what the caches hold; and how many times
# the mean number of rows an expert may have, about.
PROGRAM_BYTES, MAX_PROGRAMS, MOST_TIMES_MEAN = 580_000, 1024, 4
# Of the demo model, whose experts then have 10 MB each.
REPEAT = 128


class Bench:
    """One run; what it needs is checked before anything slow begins.

    Raises:
        ConfigError: a system, prompts or the model cannot be had.
    """

    def __init__(self, options: Options) -> None:
        transformers.logging.disable_progress_bar()
        self.options = options
        self.systems = find_systems(options.systems)
        self._check_link()
        # One core less computes where a link is emulated: on the machines that it stands for, copies need no core.
        self.threads = max(1, torch.get_num_threads() - (options.emulated() is not None))
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        prompts = find_example().prompts_file if options.prompts is None else Path(options.prompts)
        if options.model is None:
            self.checkpoint = find_example().widened(Path(options.out).parent, REPEAT, self._dtype)
        else:
            self.checkpoint = Path(options.model)
        self.tasks = make_tasks(options, self.checkpoint, prompts)
        self.workspace_bytes = fixed_bytes(options.workspace)
        groups = memory_groups()
        self._around: MemoryGroup | None = groups[0] if groups else None
        self.not_limited = self._why_not_limited()
        """Why memory is not limited; None: it is."""
        self.failed: dict[str, str] = {}
        """Peers that could not be made ready, and why."""

    def run(self) -> Report:
        """Measure everything, and close everything.

        Raises:
            WorkerError: the unmodified model cannot be opened.
            TokensDifferError: a system's tokens are not the unmodified model's; nothing is reported of such a run.
        """
        with ExitStack() as stack:
            resident = self.start(stack, KNOWN[RESIDENT], self.options.cache[0], None)
            sizes = resident.sizes()
            slots = {cache: resident.slots_bytes(cache) for cache in self.options.cache}
            self._check_ram(max(slots.values()))
            references = [self._refer(resident, task) for task in self.tasks]
            link = self._emulated(sizes, references[0])
            for system in self.systems:
                if system.kind not in ("promoe", "resident"):
                    self._prepare(resident, system)
        tables = []
        for cache in self.options.cache:
            tables += self._measure(cache, sizes, references, self._limit_bytes(sizes, slots[cache]), link)
        words = "the disk" if link is None else f"emulated, {format_number(link.bandwidth_bytes_per_s / 1e6)} MB/s"
        return Report(self.checkpoint.name, self.options, self.threads, sizes, self.not_limited, words, tables)

    def _measure(
        self,
        cache: str,
        sizes: Sizes,
        references: Sequence[Reference],
        limit_bytes: int | None,
        link: EmulatedLink | None,
    ) -> list[Table]:
        """A table per task. The unmodified model is as new to the prompts as the others are: for each number of rows that an
        expert is multiplied with for the first time, oneDNN makes a program, which of a long prompt is much of the time."""
        with ExitStack() as stack:
            resident = self.start(stack, KNOWN[RESIDENT], cache, None)
            return Round(self, resident, sizes, references, cache, limit_bytes, link).measure()

    def _limit_bytes(self, sizes: Sizes, slots_bytes: int) -> int | None:
        """What each system but the unmodified model may have; None: as much as it likes."""
        if self.not_limited:
            return None
        computing_bytes = self._activation_bytes(sizes) + self._kept_bytes(sizes)
        return sizes.other_bytes + slots_bytes + self.workspace_bytes + computing_bytes

    def open_probe(self, stack: ExitStack, mode: ProbeMode) -> Callable[[], float]:
        """What measures how many bytes per second the checkpoint's files give in a mode; the stack closes it."""
        store = open_without_experts(self.checkpoint, dtype=self._dtype).store
        stack.callback(store.close)
        link = FileLink(store, mode)
        stack.callback(link.close)
        return partial(link_bandwidth, link, store)

    def contention(self, resident: Worker, reader: Reader, ids: Sequence[int]) -> Contention:
        """What computing and reading as this library's systems do lose to each other."""
        return resident.contention(Contending(self.checkpoint, self.options.dtype, reader, ids, CONTENTION_SECONDS))

    def start(self, stack: ExitStack, system: System, cache: str, limit_bytes: int | None, **more: Any) -> Worker:
        """Open a system in a process, which the stack closes.

        Raises:
            WorkerError: it cannot be opened.
        """
        opening = Opening(system, self.checkpoint, self.options.dtype, cache, self._folder(system), None, self.threads)
        worker = Worker(replace(opening, **more), limit_bytes, self._around)
        stack.callback(worker.close)
        return worker

    def _prepare(self, resident: Worker, system: System) -> None:
        try:
            resident.prepare(Preparing(system.kind, self.checkpoint, self._folder(system)))
        except WorkerError as error:
            self.failed[system.name] = f"Its files could not be written. {error}"

    def _activation_bytes(self, sizes: Sizes) -> int:
        """What a layer's experts take between their matrices for the longest prompt, in the stock kernels: with what the
        activation function and the next product write, twice as much as comes out of the first."""
        widest = max(
            top_k * nbytes // sizes.hidden_size for top_k, nbytes in zip(sizes.top_k, sizes.expert_bytes, strict=True)
        )
        return 2 * self._longest * widest

    def _kept_bytes(self, sizes: Sizes) -> int:
        """What is kept of products after long prompts: two per expert, and a program for each number of rows that one had."""
        mean = max(self._longest * top_k / count for top_k, count in zip(sizes.top_k, sizes.num_experts, strict=True))
        return PROGRAM_BYTES * min(MAX_PROGRAMS, int(2 * MOST_TIMES_MEAN * mean))

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for task in self.tasks for prompt in task.prompts)

    def _refer(self, resident: Worker, task: Task) -> Reference:
        bar = tqdm(task.prompts, desc=f"reference: {task.name}", unit="answer", disable=None, leave=False)
        return Reference(task, [resident.answer(replace(prompt, record=True)) for prompt in bar])

    def _emulated(self, sizes: Sizes, reference: Reference) -> EmulatedLink | None:
        emulated = self.options.emulated()
        if emulated is None:
            return None
        if emulated.bytes_per_s is not None:
            return EmulatedLink(emulated.bytes_per_s)
        assert emulated.ratio is not None
        compute_s = median(tpots_s([answer.generation for answer in reference.answers[1:]]))
        return EmulatedLink(sizes.token_bytes / (emulated.ratio * compute_s))

    def _folder(self, system: System) -> Path:
        return Path(self.options.out) / "peers" / f"{self.checkpoint.name}-{system.kind}"

    def _check_link(self) -> None:
        peers = [system.name for system in self.systems if system.kind not in ("promoe", "resident")]
        if self.options.emulated() is not None and peers:
            raise ConfigError(
                f"An emulated link is for this library's systems; {', '.join(peers)} read the disk. Leave them out of "
                "--systems, or use --link disk."
            )

    def _check_ram(self, slots_bytes: int) -> None:
        limited = [system for system in self.systems if system.name != RESIDENT]
        needed_bytes = len(limited) * (slots_bytes + self.workspace_bytes) + SPARE_RAM_BYTES
        free_bytes = free_ram_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ConfigError(
                f"{len(limited)} systems at once take up to {format_memory(needed_bytes)} beside the unmodified model; "
                f"{format_memory(free_bytes)} are free. Name fewer with --systems, or smaller ones with --cache."
            )

    def _why_not_limited(self) -> str | None:
        if self.options.emulated() is not None:
            return "an emulated link copies from the page cache, which therefore holds all experts"
        if self._around is None:
            return "this system has no control groups for memory"
        try:
            self._around.new_inside(self.workspace_bytes).remove()
        except NoControlGroupError as error:
            return str(error)
        return None
