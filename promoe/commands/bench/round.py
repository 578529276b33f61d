"""A comparison at one cache size: the systems take turns prompt by prompt, their tokens are verified, their times bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tqdm import tqdm

from promoe.commands.bench.messages import Facts, Sizes
from promoe.commands.bench.process import OpenSystem, WorkerError
from promoe.commands.bench.systems import System
from promoe.commands.bench.table import Row, Table
from promoe.commands.bench.tasks import Reference
from promoe.commands.contention import Contention
from promoe.commands.lower_bound import Missed, missed_by_answer, needed_share
from promoe.commands.measure import Generation, tpots_s, ttfts_s
from promoe.scheduler import SchedulerConfig
from promoe.stores.layout import ExpertLayout
from promoe.transfer.cpu_contention import CoreWatch, Taken
from promoe.units import is_number, ratio

# Computing and reading that do not hinder each other: the bound is max(compute, transfer).
_APART = Contention(1.0, math.inf)


@dataclass
class Measured:
    """What one task gave, by system.

    Attributes:
        answers: to the measured prompts.
        facts: what was counted.
        peaks: the most memory that counted against a limit.
        in_place: answers of the unmodified model whose experts this library ran, where they are.
        packed: layouts of a system's experts that have matrices in another format than the plain one.
        taken: what other processes took of the cores meanwhile.
    """

    answers: dict[str, list[Generation]] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    in_place: list[Generation] = field(default_factory=list)
    packed: frozenset[ExpertLayout] = frozenset()
    taken: Taken | None = None

    def reached(self, name: str) -> float:
        """Return the bytes per second that a system got from the link while it decoded."""
        facts = self.facts.get(name)
        if facts is None or facts.stats is None:
            return 0.0
        seconds = ratio(facts.stats.decode.bytes_total, sum(sum(answer.gaps_s) for answer in self.answers[name]))
        return seconds if is_number(seconds) else 0.0


@dataclass
class Round:
    """A comparison at one cache size.

    Attributes:
        systems: all of them, in the order of the tables.
        references: the tasks, and the answers that the systems have to give unless they are quantised.
        sizes: of the model.
        cache: size of the cache.
        limit_bytes: memory of each system; None: no limit.
        errors: why a system has no (more) answers, by name; grows while the round runs.
        quantised: likewise for quantised systems, by the form of their experts.
    """

    systems: Sequence[System]
    references: Sequence[Reference]
    sizes: Sizes
    cache: str
    limit_bytes: int | None = None
    errors: dict[str, str] = field(default_factory=dict)
    quantised: Mapping[str, Sequence[Reference]] = field(default_factory=dict)

    def measure(
        self,
        opened: Mapping[str, OpenSystem],
        bandwidth: Callable[[], float],
        in_place: OpenSystem | None = None,
        contention: Callable[[], Contention | None] = lambda: None,
    ) -> list[Table]:
        """Let the systems answer all tasks.

        Args:
            opened: the systems that could be opened, by name.
            bandwidth: measures the bytes per second that the link can reach. A disk's speed drifts: the largest of what is
                measured before and after, and of what systems got from the link, is nearest to what they could have had.
            in_place: the unmodified model, which also runs its experts as this library does; None: that is not measured.
            contention: measures how much computing and reading slow each other; None: they do not.

        Returns:
            A table per task.

        Raises:
            TokensDifferError: the tokens of a system are not those of the reference.
        """
        before = bandwidth()
        found = [self._take_turns(number, opened, in_place) for number in range(len(self.references))]
        reached = [measured.reached(name) for measured in found for name in measured.facts]
        best = max(before, bandwidth(), *reached)
        return self.tables(found, best, contention())

    def _references_of(self, system: System) -> Sequence[Reference]:
        """Return the tasks with the answers that a system has to give, or, if it is llama.cpp's, is compared with."""
        if system.is_llama_cpp:
            return self.quantised.get(system.experts, self.references)
        return self.quantised[system.experts] if system.is_quantised else self.references

    def _take_turns(self, task_idx: int, opened: Mapping[str, OpenSystem], in_place: OpenSystem | None) -> Measured:
        """Run the systems in the order A B C A B C, so that what drifts in the machine drifts for all."""
        reference = self.references[task_idx]
        expected = {
            system.name: self._references_of(system)[task_idx] for system in self.systems if not system.is_llama_cpp
        }
        packed = frozenset[ExpertLayout]().union(*(system.facts().packed for system in opened.values()))
        found = Measured({name: [] for name in opened}, packed=packed)
        prompts = reference.task.prompts
        watch = CoreWatch()
        with tqdm(total=len(opened) * len(prompts), unit="answer", disable=None, leave=False) as bar:
            bar.set_description(f"cache {self.cache}, {reference.task.name}")
            for number, prompt in enumerate(prompts):
                for name, system in opened.items():
                    bar.set_postfix_str(name)
                    try:
                        if name not in self.errors:
                            answer = system.answer(prompt).generation
                            if name in expected:
                                expected[name].verify(name, number, answer, partly=math.isfinite(prompt.seconds))
                            if number > 0:
                                found.answers[name].append(answer)
                            else:
                                system.reset()
                    except WorkerError as error:
                        self.errors[name] = str(error)
                    bar.update()
                if in_place is not None:
                    # Packing changes the time of every token; without it only long prompts use other products.
                    new_tokens = prompt.new_tokens if packed else 1
                    asked = replace(prompt, new_tokens=new_tokens, in_place=True, packed=packed)
                    answer = in_place.answer(asked).generation
                    reference.verify("in place", number, answer, partly=True)
                    if number > 0:  # the first time the rows are proved, too, which takes longer
                        found.in_place.append(answer)
        found.taken = watch.taken()
        for name, system in opened.items():
            if name not in self.errors:
                found.facts[name], found.peaks[name] = system.facts(), system.peak_limited_bytes
        return found

    def tables(
        self, found: Sequence[Measured], bandwidth_bytes_per_s: float, contention: Contention | None = None
    ) -> list[Table]:
        """Return a table per task, with the least times that were possible.

        Args:
            found: what each task gave.
            bandwidth_bytes_per_s: that the link can reach.
            contention: how much computing and reading slow each other; None: they do not.
        """
        configs = {name: facts.scheduler for one in found for name, facts in one.facts.items()}
        missed = {
            system.name: self._missed(config, self._references_of(system))
            for system in self.systems
            if (config := configs.get(system.name)) is not None
        }
        tables = []
        for number, (reference, measured) in enumerate(zip(self.references, found, strict=True)):
            compute = _Compute.of(reference, measured, self.systems)
            rows = [self._row(system, number, measured) for system in self.systems]
            for row in rows:
                if row.stats is None:
                    continue
                if row.system.is_quantised:
                    # How much reading slows computing was measured with experts in 16 bits.
                    filled = _Compute.of_quantised(row.system, reference, measured, self.systems)
                    _bound(row, missed[row.system.name][number], filled, bandwidth_bytes_per_s, None)
                else:
                    _bound(row, missed[row.system.name][number], compute, bandwidth_bytes_per_s, contention)
            tables.append(
                Table(
                    self.cache,
                    reference.task,
                    self.sizes,
                    self.limit_bytes,
                    bandwidth_bytes_per_s,
                    rows,
                    contention,
                    median(compute.prompts_s) if compute.known else None,
                    median(compute.unmodified_s) if compute.known else None,
                    measured.taken,
                )
            )
        return tables

    def _row(self, system: System, task_idx: int, measured: Measured) -> Row:
        name = system.name
        row = Row(system, measured.answers.get(name, []), error=self.errors.get(name))
        reference = self._references_of(system)[task_idx]
        if system.is_llama_cpp:  # its own answers, which may have been cut short
            row.count_same(row.answers, reference)
        elif system.is_quantised:
            row.count_same(reference.measured, self.references[task_idx])
        if (facts := measured.facts.get(name)) is not None:
            row.stats = facts.stats
            row.peak_rss_bytes, row.peak_limited_bytes = facts.peak_rss_bytes, measured.peaks[name]
        return row

    @staticmethod
    def _missed(config: SchedulerConfig, references: Sequence[Reference]) -> list[list[Missed]]:
        """Return what each measured answer of each task misses. Slots stay filled from one task to the next."""
        routing = [answer.routing for reference in references for answer in reference.answers]
        missed = iter(missed_by_answer(config, routing))
        return [[next(missed) for _ in reference.answers][1:] for reference in references]


@dataclass(frozen=True)
class _Compute:
    """Seconds that computing takes for each measured prompt, with everything in memory.

    Attributes:
        known: whether such a model was run; if not, all times are 0, and bounds are those of the link.
        prompts_s: to read it, as the unmodified model or as this library runs its experts, whichever is less.
        unmodified_s: per token, of the unmodified model.
        tokens_s: per token, with packed experts if any system has them.
        packed: whether one has.
    """

    known: bool
    prompts_s: Sequence[float]
    unmodified_s: Sequence[float]
    tokens_s: Sequence[float]
    packed: bool

    @classmethod
    def of(cls, reference: Reference, measured: Measured, systems: Sequence[System]) -> _Compute:
        resident = next((one.name for one in systems if one.kind == "resident" and not one.is_quantised), "")
        answers = measured.answers.get(resident) or (reference.measured if reference.unmodified else [])
        if not answers:
            return cls.unknown(reference)
        prompts_s, unmodified_s = ttfts_s(answers), tpots_s(answers)
        tokens_s = unmodified_s
        if measured.in_place:
            prompts_s = _least(prompts_s, ttfts_s(measured.in_place))
        if measured.packed and measured.in_place:
            tokens_s = _least(unmodified_s, tpots_s(measured.in_place))
        return cls(True, prompts_s, unmodified_s, tokens_s, bool(measured.packed))

    @classmethod
    def of_quantised(
        cls, system: System, reference: Reference, measured: Measured, systems: Sequence[System]
    ) -> _Compute:
        """Return the times with all experts in slots, in the form of a system.

        If a system that also fetches took less, computing takes no more than that: where it has slots for all experts, the
        two differ only by chance.
        """
        answers = measured.answers.get(system.reference)
        if not answers:
            return cls.unknown(reference)
        prompts_s, tokens_s = ttfts_s(answers), tpots_s(answers)
        for other in systems:
            found = measured.answers.get(other.name, ())
            if other.experts == system.experts and not other.is_peer and len(found) == len(answers):
                prompts_s, tokens_s = _least(prompts_s, ttfts_s(found)), _least(tokens_s, tpots_s(found))
        return cls(True, prompts_s, tokens_s, tokens_s, False)

    @classmethod
    def unknown(cls, reference: Reference) -> _Compute:
        """Return times that bound nothing."""
        none = [0.0] * len(reference.measured)
        return cls(False, none, none, none, False)


def _bound(
    row: Row,
    missed: Sequence[Missed],
    compute: _Compute,
    bandwidth_bytes_per_s: float,
    contention: Contention | None,
) -> None:
    """Set the bounds of a row of this library."""
    assert row.stats is not None
    share = needed_share([one.token_bytes for one in missed], row.stats.decode)
    token_bytes = [share * one.token_bytes for one in missed]

    def bound(compute_s: Sequence[float], nbytes: Sequence[float], beside: Contention = _APART) -> float | None:
        """Return the median over prompts: it bounds the median of times, since each prompt bounds its own."""
        pairs = [pair for pair in zip(compute_s, nbytes, strict=True) if all(map(is_number, pair))]
        return median(beside.token_s(*pair, bandwidth_bytes_per_s) for pair in pairs) if pairs else None

    row.ttft_bound_s = bound(compute.prompts_s, [one.prompt_bytes for one in missed])
    row.tpot_bound_s = bound(compute.tokens_s, token_bytes)
    if compute.packed:
        row.tpot_unmodified_s = bound(compute.unmodified_s, token_bytes)
    if contention is not None:
        row.tpot_shared_s = bound(compute.tokens_s, token_bytes, contention)


def _least(one_s: Sequence[float], other_s: Sequence[float]) -> list[float]:
    """Return the smaller of the two times, prompt by prompt."""
    return [min(both) for both in zip(one_s, other_s, strict=True)]


def decode_visits(references: Sequence[Reference]) -> list[tuple[int, list[int]]]:
    """Return (layer, experts) of every layer visit of one token, in the order of the references."""
    return [
        (layer_idx, sorted(set(tokens[0])))
        for reference in references
        for answer in reference.answers
        for routed in answer.routing
        for layer_idx, tokens in routed.visits
        if len(tokens) == 1
    ]
