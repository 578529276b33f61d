"""`promoe bench --task throughput`: generated tokens per second of many prompts, by system and by sequences at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from promoe.commands.bench.many import Many, ManyAnswers, Way, cut_up, lengths
from promoe.commands.bench.messages import Facts, Sizes
from promoe.commands.bench.options import Options
from promoe.commands.bench.process import Worker, WorkerError
from promoe.commands.bench.run import Bench
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import EXACT, KNOWN, RESIDENT, System
from promoe.commands.bench.tasks import TokensDifferError
from promoe.commands.plan.many_prompts import measure_machine
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.sizes import Room
from promoe.commands.plan.throughput import BatchModel, BatchWork, Setting
from promoe.errors import PromoeError
from promoe.files import check_writable, make_folder, write_atomically
from promoe.runtime.sizes import CacheSize
from promoe.stats.figure_style import COLOURS, DPI, MARKERS, new_figure, plain, set_title
from promoe.units import DASH, aligned, format_megabytes, format_number, format_percent, format_seconds, format_times

References = dict[tuple[str, int], ManyAnswers]
"""(system, sequences at once) -> the answers that others are compared with."""
# Prompts that are answered one by one: a few tell how fast that is.
ALONE = 8
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class ThroughputRow:
    """What one way to answer gave.

    Attributes:
        system: who answered.
        many: what, and how.
        answers: what became of it.
        facts: what was counted.
        peak_bytes: the most memory that counted against the limit; None: there was none.
        planned: tokens per second that a plan expects; None: it says nothing of this.
        same: share of the answers with the tokens of the system's reference in the same steps; None: not compared.
    """

    system: System
    many: Many
    answers: ManyAnswers
    facts: Facts
    peak_bytes: int | None
    planned: float | None
    same: float | None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of experts that came over the link for each generated token."""
        stats = self.facts.stats
        return None if stats is None else stats.total.bytes_total / sum(map(len, self.answers.tokens))

    @property
    def waiting(self) -> float | None:
        """The share of the time in which the model waited for experts."""
        stats = self.facts.stats
        return None if stats is None else stats.total.stall_s / self.answers.took_s

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "system": self.system.name,
            "way": self.many.way,
            "at_once": self.many.at_once,
            "prompts": len(self.many.prompts),
            "new_tokens": self.many.new_tokens,
            "took_s": self.answers.took_s,
            "waited_s": self.answers.waited_s,
            "tokens_per_s": self.answers.tokens_per_s,
            "planned_tokens_per_s": self.planned,
            "bytes_per_token": self.bytes_per_token,
            "waiting": self.waiting,
            "peak_limited_bytes": self.peak_bytes,
            "same_answers": self.same,
        }


class ThroughputBench:
    """One run.

    Raises:
        PromoeError: something that it needs is missing.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bench = Bench(options)
        groups = sorted(set(options.at_once))
        text = [token for prompt in self.bench.tasks[0].prompts for token in prompt.ids]
        self.pad_token_id = self.bench.tasks[0].prompts[0].pad_token_id or 0
        counts = lengths(options.lengths, max(*groups, ALONE))
        self.prompts = cut_up(text, counts)
        self.groups = groups
        self.failed: dict[str, str] = {}
        self._limit_bytes: int | None = None
        self._expected: dict[str, BatchModel | None] = {}

    def run(self) -> Iterator[ThroughputRow]:
        """Yield a row for each way in which each system answers.

        Raises:
            WorkerError: the unmodified model cannot be opened.
            TokensDifferError: a system's tokens are not those of its reference.
        """
        options, bench = self.options, self.bench
        cache = options.cache[0]
        references: References = {}
        for system in bench.systems:
            if system.is_ours:
                self._expect(system)
        with ExitStack() as stack:
            resident = bench.start(stack, KNOWN[RESIDENT], cache)
            sizes, slots_bytes = resident.ask(Served.sizes), resident.ask(Served.slots_bytes, cache)
            for system in bench.systems:
                if system.is_peer:
                    bench.prepare(resident, system)
            for row in self._rows(resident, KNOWN[RESIDENT], self.ways(KNOWN[RESIDENT]), None):
                references[RESIDENT, row.many.at_once] = row.answers
                yield row
        self._limit_bytes = None if bench.not_limited else self._limited(sizes, slots_bytes)
        for system in sorted(bench.systems, key=lambda one: one.kind != "resident"):
            if (why := bench.failed.get(system.name)) is not None:
                self.failed[system.name] = str(why)
            elif system.name != RESIDENT:
                size = bench.cache_of(system, cache, sizes, slots_bytes)
                yield from self._of_system(system, "100%" if system.kind == "resident" else size, references)

    def _of_system(self, system: System, cache: CacheSize, references: References) -> Iterator[ThroughputRow]:
        """Yield the rows of a system. A way that it does not survive is noted, and the others go on."""
        filled = system.kind == "resident"
        ways = self.ways(system)
        while ways:
            done = 0
            try:
                with ExitStack() as stack:
                    worker = self.bench.start(stack, system, cache, None if filled else self._limit_bytes)
                    for row in self._rows(worker, system, ways, None if filled else references):
                        if filled:
                            references[system.name, row.many.at_once] = row.answers
                        done += 1
                        yield row
            except WorkerError as error:
                self.failed[f"{system.name}, {ways[done].way}, {ways[done].at_once}"] = str(error)
            ways = ways[done + 1 :]

    def ways(self, system: System) -> list[Many]:
        """Return how a system answers: each peer in the way that suits it, and the first of this library's in all ways."""
        most = self.groups[-1]
        if system.kind == "disk-offload" or system.slots == "one layer":
            return [self._many("padded", most)]
        if system.kind == "page-cache":
            return [self._many("together", most)]
        together = [self._many("together", number) for number in self.groups]
        if system != next(one for one in self.bench.systems if one.is_ours):
            return together
        return [self._many("alone", 1), *(self._many("padded", number) for number in self.groups), *together]

    def _many(self, way: Way, at_once: int) -> Many:
        options, step_tokens = self.options, max(self.options.step_tokens, at_once)
        return Many(self.prompts[: max(ALONE, at_once)], options.max_new_tokens, way, at_once, step_tokens)

    def _rows(
        self, worker: Worker, system: System, ways: Sequence[Many], references: References | None
    ) -> Iterator[ThroughputRow]:
        worker.ask(Served.answer_many, Many(self.prompts[:1], WARM_UP_TOKENS, "alone"), self.pad_token_id)
        for many in ways:
            worker.reset()
            answers = worker.ask(Served.answer_many, many, self.pad_token_id)
            same = None
            if references is not None and many.way == "together":
                same = self._same(system, many, answers, references[system.reference, many.at_once])
            yield ThroughputRow(
                system, many, answers, worker.facts(), worker.peak_limited_bytes, self._planned(system, many), same
            )

    def _same(self, system: System, many: Many, answers: ManyAnswers, reference: ManyAnswers) -> float:
        same = sum(one == other for one, other in zip(answers.tokens, reference.tokens, strict=True))
        if same < len(answers.tokens) and system.config.kernels == "exact":
            raise TokensDifferError(
                f"“{system.name}” gave {len(answers.tokens) - same} of {len(answers.tokens)} answers with other tokens than "
                f"“{system.reference}” with {many.at_once} sequences at once. The promise of identical output is broken. "
                "Please report it with the versions of promoe, torch and transformers."
            )
        return same / len(answers.tokens)

    def _limited(self, sizes: Sizes, slots_bytes: int) -> int:
        """Return the memory of each system: what steps take, the KV cache, and the attention mask of a step."""
        many = self._many("together", self.groups[-1])
        step = many.step_tokens
        planned = next((model for model in self._expected.values() if model is not None), None)
        kv_bytes = 0 if planned is None else planned.kv_bytes(many.kv_tokens)
        return self.bench.limit_bytes(sizes, slots_bytes, step) + kv_bytes + 4 * step * (many.kv_tokens + step)

    def _expect(self, system: System) -> None:
        """Measure this machine for a form, with exact and fast kernels, as a plan does."""
        key = system.experts
        if key in self._expected or system.gguf_type is not None:
            return
        try:
            read = read_model(str(self.bench.checkpoint), self.options.dtype, system.experts)
            assert read.store is not None
            with closing(read.store):
                # Memory in which not all files fit: then the library reads past the page cache.
                machine = measure_machine(read, read.sizes.slots_bytes // 2)
            self._expected[key] = BatchModel(read.sizes, machine, BatchWork(1, 1.0, 1.0, 1))
        except PromoeError:
            self._expected[key] = None

    def _planned(self, system: System, many: Many) -> float | None:
        model = self._expected.get(system.experts) if system.is_ours else None
        if model is None or many.way != "together":
            return None
        prompts = [len(ids) for ids in many.prompts]
        work = BatchWork(len(prompts), sum(prompts) / len(prompts), many.new_tokens, max(prompts) + many.new_tokens)
        kernels = system.config.kernels
        room = Room("RAM", None, 0, None)
        rate = room.rate_of(self.options.cache[0], model.sizes)
        if system.is_quantised:  # as many bytes hold more of them
            plain = self._expected.get(EXACT)
            rate = min(1.0, rate * plain.sizes.slots_bytes / model.sizes.slots_bytes) if plain is not None else rate
        setting = Setting(many.at_once, many.step_tokens, many.kv_tokens, rate, kernels)
        return BatchModel(model.sizes, model.machine, work).expected(setting).tokens_per_s


def run_throughput(options: Options, out: TextIO | None = None) -> list[ThroughputRow]:
    """Measure, print and write.

    Raises:
        PromoeError: something that it needs is missing or cannot be written, before anything is measured; or a system
            generated other tokens than the unmodified model.
    """
    make_folder(options.folder)
    outputs = [check_writable(path) for path in (options.json_file, options.folder / "throughput.md")]
    bench = ThroughputBench(options)
    rows: list[ThroughputRow] = []
    for row in bench.run():
        rows.append(row)
        print(f"{_name(row)}: {format_number(row.answers.tokens_per_s)} tokens/s", file=sys.stderr, flush=True)
        write_atomically(outputs[0], [json.dumps(_as_json(bench, rows), indent=2), "\n"])  # a row may take minutes
    lines = list(_lines(bench, rows))
    print(*lines, sep="\n", file=out)
    write_atomically(outputs[0], [json.dumps(_as_json(bench, rows), indent=2), "\n"])
    write_atomically(outputs[1], [f"{line}\n" for line in lines])
    outputs.append(_draw(bench, rows, options.folder / "throughput.png"))
    print("", *(f"written: {path}" for path in outputs), sep="\n", file=out)
    return rows


def _as_json(bench: ThroughputBench, rows: Sequence[ThroughputRow]) -> dict[str, Any]:
    options = bench.options
    return {
        "model": bench.bench.checkpoint.name,
        "cache": options.cache[0],
        "lengths": options.lengths,
        "threads": bench.bench.threads,
        "memory_not_limited_because": bench.bench.not_limited,
        "rows": [row.to_json() for row in rows],
        "failed": bench.failed,
    }


def _in_words(way: Way) -> str:
    return "one by one" if way == "alone" else way


def _name(row: ThroughputRow) -> str:
    return row.system.name if row.many.way == "alone" else f"{row.system.name}, {row.many.way}, {row.many.at_once}"


def _lines(bench: ThroughputBench, rows: Sequence[ThroughputRow]) -> Iterator[str]:
    options = bench.options
    yield f"# promoe bench: throughput of {bench.bench.checkpoint.name}"
    yield ""
    tokens = sum(map(len, bench.prompts)) / len(bench.prompts)
    yield (
        f"Prompts of {format_number(tokens)} tokens on average ({max(map(len, bench.prompts))} at most), answers of "
        f"{options.max_new_tokens}, cache {options.cache[0]}, {bench.bench.threads} threads. Generated tokens / (prompts and "
        "answers). Answers together are compared with those of the unmodified model in the same steps."
    )
    if bench.bench.not_limited:
        yield f"Memory was not limited: {bench.bench.not_limited}."
    yield ""
    table = [("system", "answered", "at once", "tokens/s", "x one by one", "planned", "s per answer", "MB/token")]
    table[0] += ("waiting, %", "same answers, %", "limited, MiB")  # type: ignore[assignment]
    alone = next((row.answers.tokens_per_s for row in rows if row.many.way == "alone"), None)
    for row in rows:
        peak = DASH if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
        speed = row.answers.tokens_per_s
        cells = [
            row.system.name,
            _in_words(row.many.way),
            str(row.many.at_once),
            format_number(speed),
            DASH if alone is None else format_times(speed / alone).removesuffix("x"),
            DASH if row.planned is None else format_number(row.planned),
            format_seconds(row.answers.waited_s),
            DASH if row.bytes_per_token is None else format_megabytes(row.bytes_per_token),
            DASH if row.waiting is None else format_percent(row.waiting),
            DASH if row.same is None else format_percent(row.same),
            peak,
        ]
        table.append(tuple(cells))  # type: ignore[arg-type]
    yield from aligned(table)
    for name, why in bench.failed.items():
        yield ""
        yield f"- `{name}`: {why}"


def _draw(bench: ThroughputBench, rows: Sequence[ThroughputRow], path: Path) -> Path:
    """Draw throughput against the mean time until an answer is complete."""
    figure, axes = new_figure(1, 1, (9, 5))
    axis = axes[0]
    plain(axis)
    kinds: dict[tuple[str, Way], list[ThroughputRow]] = {}
    for row in rows:
        kinds.setdefault((row.system.name, row.many.way), []).append(row)
    for number, ((name, way), some) in enumerate(kinds.items()):
        some = sorted(some, key=lambda row: row.many.at_once)
        axis.plot(
            [row.answers.waited_s for row in some],
            [row.answers.tokens_per_s for row in some],
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=f"{name}, {_in_words(way)}",
        )
        for row in some:
            point = (row.answers.waited_s, row.answers.tokens_per_s)
            axis.annotate(str(row.many.at_once), point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axis.set(xlabel="mean seconds until an answer is complete", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    set_title(
        figure,
        f"{bench.bench.checkpoint.name}: many prompts",
        f"cache {bench.options.cache[0]}; numbers are sequences at once",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)
    return path
