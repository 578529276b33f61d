"""One cache size of `promoe bench`: all systems in processes of their own, taking turns prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from tqdm import tqdm

from promoe.commands.bench.process import Worker, WorkerError
from promoe.commands.bench.results import Row, Table, median_bound
from promoe.commands.bench.systems import ORACLE, RESIDENT, System
from promoe.commands.bench.tasks import Task
from promoe.commands.bench.worker import Answer, Facts, Reader, Sizes
from promoe.commands.contention import Contention
from promoe.commands.demo.comparison import TokensDifferError, verify
from promoe.commands.lower_bound import missed_bytes
from promoe.commands.measure import Generation, tpots_s, ttfts_s
from promoe.scheduler import SchedulerConfig
from promoe.transfer.cpu_contention import CoreWatch, Taken
from promoe.transfer.links import EmulatedLink
from promoe.units import ratio

if TYPE_CHECKING:
    from promoe.commands.bench.run import Bench


@dataclass(frozen=True)
class Reference:
    """The unmodified model's answers to one task, warm-up first, with their routing."""

    task: Task
    answers: Sequence[Answer]


@dataclass
class _Measured:
    """What one task gave, by system, and how long it takes this library at least: nothing is missing, packed or not."""

    answers: dict[str, list[Generation]] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    in_place: list[Generation] = field(default_factory=list)
    packed: frozenset[str] = frozenset()
    taken: Taken | None = None


class Round:
    """All systems at one cache size.

    Args:
        bench: opens them.
        resident: the unmodified model, already open.
        sizes: of the model.
        references: of each task.
        cache: slots.
        limit_bytes: memory of each system; None: no limit.
        link: for this library's systems; None: the disk.
    """

    def __init__(
        self,
        bench: Bench,
        resident: Worker,
        sizes: Sizes,
        references: Sequence[Reference],
        cache: str,
        limit_bytes: int | None,
        link: EmulatedLink | None,
    ) -> None:
        self._bench = bench
        self._resident = resident
        self._sizes = sizes
        self._references = references
        self._cache = cache
        self._limit_bytes = limit_bytes
        self._link = link
        self._errors: dict[str, str] = dict(bench.failed)

    def measure(self) -> list[Table]:
        """A table per task.

        Raises:
            TokensDifferError: a system's tokens are not the unmodified model's.
        """
        with ExitStack() as stack:
            workers = self._open_all(stack)
            reader = self._reader(workers)
            probe = self._open_probe(stack, reader)
            bandwidth = probe()
            found = [self._measure_task(reference, workers) for reference in self._references]
            # A disk's speed drifts: the faster of two probes around the runs is nearer to what they could have had.
            bandwidth = max(bandwidth, probe())
            ids = self._references[0].task.prompts[0].ids
            # A link that is emulated stands for one that takes no core from computing.
            contention = None if reader is None else self._bench.contention(self._resident, reader, ids)
        schedulers = {name: facts.scheduler for one in found for name, facts in one.facts.items()}
        missed = {name: self._missed(config) for name, config in schedulers.items() if config is not None}
        return [self._table(number, found[number], missed, bandwidth, contention) for number in range(len(found))]

    def _reader(self, workers: dict[str, Worker]) -> Reader | None:
        """How this library's systems read files; None: their link is emulated."""
        found = (workers[system.name].facts().reader for system in self._bench.systems if system.name in workers)
        return next((reader for reader in found if reader is not None), None)

    def _open_probe(self, stack: ExitStack, reader: Reader | None) -> Callable[[], float]:
        """What measures, or knows, the bytes per second that the link can reach."""
        if reader is not None:
            return self._bench.open_probe(stack, reader.mode)
        link = self._link
        assert link is not None, "a round has one of this library's systems"
        return lambda: link.bandwidth_bytes_per_s

    def _open_all(self, stack: ExitStack) -> dict[str, Worker]:
        workers: dict[str, Worker] = {}
        for system in self._bench.systems:
            if system.name in self._errors:
                continue
            try:
                workers[system.name] = self._resident if system.name == RESIDENT else self._open(stack, system)
            except WorkerError as error:
                self._errors[system.name] = str(error)
        if not any(system.kind == "promoe" and system.name in workers for system in self._bench.systems):
            raise WorkerError("None of this library's systems could be opened. " + " ".join(self._errors.values()))
        return workers

    def _open(self, stack: ExitStack, system: System) -> Worker:
        return self._bench.start(
            stack,
            system,
            self._cache,
            self._limit_bytes,
            link=self._link if system.kind == "promoe" else None,
            num_experts=self._sizes.num_experts,
            decode_visits=_decode_visits(self._references) if system.predictor == ORACLE else (),
        )

    def _measure_task(self, reference: Reference, workers: dict[str, Worker]) -> _Measured:
        packed = frozenset[str]().union(*(worker.facts().packed for worker in workers.values()))
        found = _Measured({name: [] for name in workers}, packed=packed)
        prompts = reference.task.prompts
        watch = CoreWatch()
        with tqdm(total=len(workers) * len(prompts), unit="answer", disable=None, leave=False) as bar:
            bar.set_description(f"cache {self._cache}, {reference.task.name}")
            for number, (prompt, expected) in enumerate(zip(prompts, reference.answers, strict=True)):
                for name, worker in workers.items():
                    bar.set_postfix_str(name)
                    try:
                        if name not in self._errors:
                            answer = worker.answer(prompt).generation
                            _check(name, number, answer, expected.generation)
                            if number > 0:
                                found.answers[name].append(answer)
                            else:
                                worker.reset()
                    except WorkerError as error:
                        self._errors[name] = str(error)
                    bar.update()
                # Packed or not makes a difference to every token; of others it is the same products but for long prompts.
                new_tokens = prompt.new_tokens if packed else 1
                asked = replace(prompt, new_tokens=new_tokens, in_place=True, packed=packed)
                in_place = self._resident.answer(asked).generation
                _check("in place", number, in_place, expected.generation)
                if number > 0:  # the first time proves the rows, too, which takes longer
                    found.in_place.append(in_place)
        found.taken = watch.taken()
        for name, worker in workers.items():
            if name not in self._errors:
                found.facts[name], found.peaks[name] = worker.facts(), worker.peak_limited_bytes
        return found

    def _table(
        self,
        number: int,
        found: _Measured,
        missed: dict[str, list[list[tuple[float, float]]]],
        bandwidth: float,
        contention: Contention | None,
    ) -> Table:
        reference = self._references[number]
        compute = found.answers.get(RESIDENT) or [answer.generation for answer in reference.answers[1:]]
        unmodified_s = tokens_s = tpots_s(compute)
        prompts_s = _least(ttfts_s(compute), ttfts_s(found.in_place))
        if found.packed:
            tokens_s = _least(unmodified_s, tpots_s(found.in_place))
        rows = []
        for system in self._bench.systems:
            name = system.name
            row = Row(system, found.answers.get(name, []), error=self._errors.get(name))
            if (facts := found.facts.get(name)) is not None:
                row.peak_rss_bytes, row.peak_limited_bytes = facts.peak_rss_bytes, found.peaks[name]
                if facts.stats is not None:
                    row.prefill, row.decode = facts.stats.prefill, facts.stats.decode
                    prompt_bytes, token_bytes = zip(*missed[name][number], strict=True)
                    row.ttft_bound_s = median_bound(prompts_s, prompt_bytes, bandwidth)
                    row.tpot_bound_s = median_bound(tokens_s, token_bytes, bandwidth)
                    if found.packed:
                        row.tpot_unmodified_s = median_bound(unmodified_s, token_bytes, bandwidth)
                    if contention is not None:
                        row.tpot_shared_s = median_bound(tokens_s, token_bytes, bandwidth, contention)
            rows.append(row)
        return Table(
            self._cache,
            reference.task.name,
            self._limit_bytes,
            bandwidth,
            rows,
            contention,
            median(prompts_s),
            found.taken,
        )

    def _missed(self, config: SchedulerConfig) -> list[list[tuple[float, float]]]:
        """Per task and measured prompt: bytes that reading it misses, and each token after it, on demand only."""
        passes = [routed for reference in self._references for answer in reference.answers for routed in answer.routing]
        missed = iter(zip(passes, missed_bytes(config, passes), strict=True))
        found = []
        for reference in self._references:
            of_task = []
            for answer in reference.answers:
                own = [next(missed) for _ in answer.routing]
                decode = [nbytes for routed, nbytes in own[1:]]
                of_task.append((float(own[0][1]), ratio(sum(decode), len(decode))))
            found.append(of_task[1:])
        return found


def _least(one_s: Sequence[float], other_s: Sequence[float]) -> list[float]:
    """Prompt by prompt."""
    return [min(both) for both in zip(one_s, other_s, strict=True)]


def _check(name: str, number: int, answer: Generation, expected: Generation) -> None:
    """An answer that was cut short is compared as far as it goes."""
    kept = len(answer.tokens)
    if kept == 0:
        raise TokensDifferError(f"“{name}” generated nothing.")
    verify(name, number, answer, Generation(expected.tokens[:kept], expected.ttft_s, expected.gaps_s[: kept - 1]))


def _decode_visits(references: Sequence[Reference]) -> list[tuple[int, list[int]]]:
    """(layer, experts) of the layer visits of one token."""
    return [
        (layer_idx, sorted(set(tokens[0])))
        for reference in references
        for answer in reference.answers
        for routed in answer.routing
        for layer_idx, tokens in routed.visits
        if len(tokens) == 1
    ]
