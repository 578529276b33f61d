"""Runs `promoe bench`: opens the unmodified model, lets it answer, and measures each cache size against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from promoe.commands.bench.example import find_example
from promoe.commands.bench.forms import cache_of, prepare_forms
from promoe.commands.bench.messages import Opening, Reader, Sizes
from promoe.commands.bench.options import Options
from promoe.commands.bench.peers import note_on_gguf
from promoe.commands.bench.process import Worker, WorkerError
from promoe.commands.bench.round import Round, decode_visits
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import BITS_OF_GGUF, EXACT, KNOWN, ORACLE, RESIDENT, System, find_systems
from promoe.commands.bench.table import Report, Table
from promoe.commands.bench.tasks import Reference, make_tasks, refer
from promoe.commands.contention import SECONDS as CONTENTION_SECONDS
from promoe.commands.contention import Contention
from promoe.commands.lower_bound import link_bandwidth
from promoe.errors import ConfigError
from promoe.model.opening import open_without_experts
from promoe.runtime.sizes import CacheSize
from promoe.transfer.control_groups import MemoryGroup, NoControlGroupError, memory_groups
from promoe.transfer.links import EmulatedLink, FileLink
from promoe.transfer.links.disk import SPARE_RAM_BYTES
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.probe import ProbeMode
from promoe.units import format_memory, format_number

# For each shape of a product, oneDNN and ATen keep a program in a cache. Its size, the capacity of the caches, and about how
# many times the mean number of rows an expert may have.
PROGRAM_BYTES, MAX_PROGRAMS, MOST_TIMES_MEAN = 580_000, 1024, 4
# How many times wider the experts of the demo model are made: 10 MB each.
REPEAT = 128


class Bench:
    """One run of `promoe bench`. What it needs is checked before anything slow begins.

    Raises:
        ConfigError: a system, the prompts or the model cannot be had.
        UnsupportedModelError: the model's experts cannot be had in a form that was asked for.
    """

    def __init__(self, options: Options) -> None:
        transformers.logging.disable_progress_bar()
        self.options = options
        self.systems = find_systems(options.named_systems)
        self._check_link()
        # Where a link is emulated, one core less computes: on the machines that it stands for, copies need no core.
        self.threads = max(1, torch.get_num_threads() - (options.emulated() is not None))
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        prompts = find_example().prompts_file if options.prompts is None else Path(options.prompts)
        if options.model is None:
            self.checkpoint = find_example().widened(options.folder.parent, REPEAT, self._dtype)
        else:
            self.checkpoint = Path(options.model)
        self.tasks = make_tasks(options, self.checkpoint, prompts)
        groups = memory_groups()
        self._around: MemoryGroup | None = groups[0] if groups else None
        self.not_limited = self._why_not_limited()
        """Why memory is not limited; None: it is."""
        self.failed: dict[str, str] = {}
        """Peers that cannot serve the model, or whose files could not be written, and why."""
        self.systems = [self._described(system) for system in self.systems]
        self._slot_bytes = prepare_forms(self.systems, self.checkpoint, self._dtype, self._folder)

    def run(self) -> Report:
        """Measure everything, and close everything.

        Raises:
            WorkerError: the unmodified model, or a quantised one that others are compared with, cannot be opened.
            TokensDifferError: a system's tokens are not those of its reference. Nothing is reported of such a run.
        """
        with ExitStack() as stack:
            resident = self.start(stack, KNOWN[RESIDENT], self.options.cache[0])
            sizes = resident.ask(Served.sizes)
            slots = {cache: resident.ask(Served.slots_bytes, cache) for cache in self.options.cache}
            self._check_ram(max(slots.values()), sizes)
            references = [refer(resident, task) for task in self.tasks]
            for system in self.systems:
                if system.is_peer and system.name not in self.failed:
                    self.prepare(resident, system)
        quantised = {
            system.experts: self._refer_quantised(system)
            for system in self.systems
            if system.kind == "resident" and system.is_quantised
        }
        emulated, link = self.options.emulated(), None
        if emulated is not None:
            link = emulated.link(sizes.token_bytes, references[0].compute_s)
        longest = max(len(prompt.ids) for task in self.tasks for prompt in task.prompts)
        tables = []
        for cache in self.options.cache:
            limit_bytes = None if self.not_limited else self.limit_bytes(sizes, slots[cache], longest)
            comparison = Round(self.systems, references, sizes, cache, limit_bytes, dict(self.failed), quantised)
            tables += self._measure(comparison, slots[cache], link)
        words = "the disk" if link is None else f"emulated, {format_number(link.bandwidth_bytes_per_s / 1e6)} MB/s"
        return Report(self.checkpoint.name, self.options, self.threads, sizes, self.not_limited, words, tables)

    def _refer_quantised(self, system: System) -> list[Reference]:
        """Let a quantised model with all experts in slots answer all tasks."""
        with ExitStack() as stack:
            filled = self.start(stack, system, "100%")
            return [refer(filled, task, unmodified=False, given_by=f"“{system.name}”") for task in self.tasks]

    def _measure(self, comparison: Round, slots_bytes: int, link: EmulatedLink | None) -> list[Table]:
        """Return a table per task.

        The unmodified model is opened anew, so that the prompts are as new to it as to the others: for each number of rows
        that an expert is multiplied with for the first time, oneDNN makes a program, which takes much of a long prompt's time.
        """
        with ExitStack() as stack:
            resident = self.start(stack, KNOWN[RESIDENT], comparison.cache)
            opened = self._open_all(stack, resident, comparison, slots_bytes, link)
            readers = (opened[system.name].facts().reader for system in self.systems if system.name in opened)
            reader = next((reader for reader in readers if reader is not None), None)
            if reader is None:
                assert link is not None, "a round has one of this library's systems"
                return comparison.measure(opened, lambda: link.bandwidth_bytes_per_s, resident)
            ids = comparison.references[0].task.prompts[0].ids
            contention = partial(self._contention, resident, reader, ids)
            return comparison.measure(opened, self._open_probe(stack, reader.mode), resident, contention)

    def _open_all(
        self, stack: ExitStack, resident: Worker, comparison: Round, slots_bytes: int, link: EmulatedLink | None
    ) -> dict[str, Worker]:
        opened: dict[str, Worker] = {}
        for system in self.systems:
            if system.name in comparison.errors:
                continue
            more: dict[str, Any] = {}
            if system.is_ours and link is not None:
                more = {"link": link, "read_mode": "page_cache"}
            if system.predictor == ORACLE:
                more |= {
                    "num_experts": comparison.sizes.num_experts,
                    "decode_visits": decode_visits(comparison.references),
                }
            limit_bytes = None if system.kind == "resident" else comparison.limit_bytes
            try:
                cache = self.cache_of(system, comparison.cache, comparison.sizes, slots_bytes)
                opened[system.name] = (
                    resident if system.name == RESIDENT else self.start(stack, system, cache, limit_bytes, **more)
                )
            except (WorkerError, ConfigError) as error:
                comparison.errors[system.name] = str(error)
        if not any(system.is_ours and system.name in opened for system in self.systems):
            raise WorkerError("None of this library's systems could be opened. " + " ".join(comparison.errors.values()))
        return opened

    def cache_of(self, system: System, cache: str, sizes: Sizes, slots_bytes: int) -> CacheSize:
        """Return the cache of a system: with experts in fewer bits, as many bytes as the others have."""
        if not system.is_ours:
            return cache
        return cache_of(system, cache, slots_bytes, self._slot_bytes[system.experts], sizes)

    def start(
        self, stack: ExitStack, system: System, cache: CacheSize, limit_bytes: int | None = None, **more: Any
    ) -> Worker:
        """Open a system in a process, which the stack closes.

        Raises:
            WorkerError: it cannot be opened.
        """
        context_tokens = max(len(prompt.ids) + prompt.new_tokens for task in self.tasks for prompt in task.prompts)
        more |= {"folder": self._folder(system), "context_tokens": context_tokens}
        opening = Opening(system, self.checkpoint, self.options.dtype, cache, **more)
        worker = Worker(opening, self.threads, limit_bytes, self._around)
        stack.callback(worker.close)
        return worker

    def _open_probe(self, stack: ExitStack, mode: ProbeMode) -> Callable[[], float]:
        """Return what measures how many bytes per second the checkpoint's files give in a mode; the stack closes it."""
        store = open_without_experts(self.checkpoint, dtype=self._dtype).store
        stack.callback(store.close)
        link = FileLink(store, mode)
        stack.callback(link.close)
        return partial(link_bandwidth, link, store)

    def _contention(self, resident: Worker, reader: Reader, ids: Sequence[int]) -> Contention:
        return resident.ask(
            Served.contention, self.checkpoint, self.options.dtype, reader, ids, seconds=CONTENTION_SECONDS
        )

    def _described(self, system: System) -> System:
        """Return a system with what is to be said of it for this model. If llama.cpp cannot serve the model, note why."""
        if system.gguf_type is None:
            return system
        try:
            return replace(system, meaning=system.meaning + note_on_gguf(system, self.checkpoint))
        except ConfigError as error:
            if not system.is_peer:
                raise
            self.failed[system.name] = str(error)
            return system

    def prepare(self, resident: Worker, system: System) -> None:
        """Write a peer's files, unless they are there; if that fails, note why."""
        try:
            resident.ask(Served.prepare, system, self.checkpoint, self._folder(system))
        except WorkerError as error:
            self.failed[system.name] = f"Its files could not be written. {error}"

    def _folder(self, system: System) -> Path:
        """Return the folder of what a system reads beside the checkpoint. A peer has one of its own."""
        kind = system.kind if system.is_peer else None
        gguf_type = None if system.gguf_type == EXACT else system.gguf_type
        return self.options.folder / "peers" / "-".join(filter(None, (self.checkpoint.name, kind, gguf_type)))

    def limit_bytes(self, sizes: Sizes, slots_bytes: int, longest: int) -> int:
        """Return the memory that each system but the unmodified model gets, if a pass has at most `longest` tokens."""
        # What a layer's experts compute of the longest prompt between their matrices, in the stock kernels. The activation
        # function and the next product need as much again as the first product writes.
        widest = max(
            top_k * nbytes // sizes.hidden_size for top_k, nbytes in zip(sizes.top_k, sizes.expert_bytes, strict=True)
        )
        # What is kept of products after long prompts: two per expert, a program for each number of rows.
        mean = max(longest * top_k / count for top_k, count in zip(sizes.top_k, sizes.num_experts, strict=True))
        kept_bytes = PROGRAM_BYTES * min(MAX_PROGRAMS, int(2 * MOST_TIMES_MEAN * mean))
        return sizes.other_bytes + slots_bytes + self.options.workspace_bytes + 2 * longest * widest + kept_bytes

    def _check_link(self) -> None:
        peers = [system.name for system in self.systems if system.is_peer]
        if self.options.emulated() is not None and peers:
            raise ConfigError(
                f"An emulated link is for this library's systems; {', '.join(peers)} read the disk. Leave them out of "
                "--systems, or use --link disk."
            )

    def _check_ram(self, slots_bytes: int, sizes: Sizes) -> None:
        limited = [system for system in self.systems if system.kind != "resident"]
        filled = [system for system in self.systems if system.kind == "resident" and system.is_quantised]
        needed_bytes = len(limited) * self.options.workspace_bytes + SPARE_RAM_BYTES
        needed_bytes += sum(min(slots_bytes, self._most_bytes(system, sizes)) for system in limited)
        needed_bytes += sum(sizes.other_bytes + self._most_bytes(system, sizes) for system in filled)
        free_bytes = free_ram_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ConfigError(
                f"{len(limited) + len(filled)} systems at once take up to {format_memory(needed_bytes)} beside the unmodified "
                f"model; {format_memory(free_bytes)} are free. Name fewer with --systems, or smaller ones with --cache."
            )

    def _most_bytes(self, system: System, sizes: Sizes) -> int:
        """Return the bytes of all experts in the form of a system."""
        if system.is_peer:
            bits = BITS_OF_GGUF.get(system.experts)
            return sizes.experts_bytes if bits is None else int(sizes.experts_bytes * bits / (8 * self._dtype.itemsize))
        of_slots = self._slot_bytes[system.experts]
        return sum(count * nbytes for count, nbytes in zip(sizes.num_experts, of_slots, strict=True))

    def _why_not_limited(self) -> str | None:
        if self.options.emulated() is not None:
            return "an emulated link copies from the page cache, which therefore holds all experts"
        if self._around is None:
            return "this system has no control groups for memory"
        try:
            self._around.new_inside(self.options.workspace_bytes).remove()
        except NoControlGroupError as error:
            return str(error)
        return None
