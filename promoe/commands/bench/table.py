"""What `promoe bench` and `promoe demo` found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from promoe.commands.bench.messages import Sizes
from promoe.commands.bench.options import Options
from promoe.commands.bench.systems import RESIDENT, System
from promoe.commands.bench.tasks import Reference, Task, num_same
from promoe.commands.contention import Contention
from promoe.commands.measure import Estimate, Generation, estimate, paired_estimates, paired_speedup, tpots_s, ttfts_s
from promoe.stats.counts import PhaseStats
from promoe.stats.recorder import Recorder
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.transfer.cpu_contention import Taken
from promoe.units import is_number


@dataclass
class Row:
    """One system at one cache size with one task.

    Attributes:
        system: the system.
        answers: one per measured prompt, in order; fewer if the system failed.
        stats: what this library counted; None for other systems.
        ttft_bound_s: the least time possible, median over the prompts; None for systems that are not this library's.
        tpot_bound_s: likewise.
        tpot_unmodified_s: the same if computing takes as long as in the unmodified model; None: experts are not packed.
        tpot_shared_s: the same if computing and reading slow each other as measured; None: they do not.
        peak_rss_bytes: the most memory of its process, libraries and mapped files included.
        peak_limited_bytes: the most that counted against the limit at once.
        num_same: tokens of the answers of a quantised system, or of llama.cpp, that are the reference's before an answer
            first differs, summed over the measured prompts; None: all have to be the same.
        num_tokens: tokens of these answers.
        same_as: what gave the answers that they were compared with, in words.
        error: why it has no (more) answers.
    """

    system: System
    answers: list[Generation] = field(default_factory=list)
    stats: Stats | None = None
    ttft_bound_s: float | None = None
    tpot_bound_s: float | None = None
    tpot_unmodified_s: float | None = None
    tpot_shared_s: float | None = None
    peak_rss_bytes: int | None = None
    peak_limited_bytes: int | None = None
    num_same: int | None = None
    num_tokens: int | None = None
    same_as: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> Estimate:
        """Seconds to the first token: median over prompts and its interval."""
        return estimate(ttfts_s(self.answers))

    @property
    def tpot(self) -> Estimate:
        """Seconds per token after the first: median over prompts and its interval; nan if only one was generated."""
        return estimate([tpot_s for tpot_s in tpots_s(self.answers) if is_number(tpot_s)])

    @property
    def prefill(self) -> PhaseStats | None:
        """What this library counted while it read prompts."""
        return None if self.stats is None else self.stats.prefill

    @property
    def decode(self) -> PhaseStats | None:
        """What this library counted while it generated."""
        return None if self.stats is None else self.stats.decode

    def count_same(self, answers: Sequence[Generation], reference: Reference) -> None:
        """Count the tokens of answers that are the reference's before they first differ."""
        pairs = zip(answers, reference.measured, strict=False)
        self.num_same = sum(num_same(one.tokens, other.tokens) for one, other in pairs)
        self.num_tokens = sum(len(answer.tokens) for answer in answers)
        self.same_as = reference.given_by

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the times of every answer."""
        return {
            "system": self.system.name,
            "meaning": self.system.meaning,
            "tokens_compared_with": None if self.system.is_llama_cpp else self.system.reference,
            "tokens_same": self.num_same,
            "tokens_same_of": self.num_tokens,
            "tokens_same_as": self.same_as,
            "error": self.error,
            "ttft_s": _known(self.ttft.value),
            "ttft_bound_s": self.ttft_bound_s,
            "tpot_s": _known(self.tpot.value),
            "tpot_interval_s": [_known(self.tpot.low), _known(self.tpot.high)],
            "tpot_bound_s": self.tpot_bound_s,
            "tpot_unmodified_s": self.tpot_unmodified_s,
            "tpot_shared_s": self.tpot_shared_s,
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_limited_bytes": self.peak_limited_bytes,
            "answers": [
                {"ttft_s": answer.ttft_s, "tpot_s": _known(answer.tpot_s), "tokens": len(answer.tokens)}
                for answer in self.answers
            ],
            "prefill": None if self.prefill is None else self.prefill.to_json(),
            "decode": None if self.decode is None else self.decode.to_json(),
        }


@dataclass(frozen=True)
class Table:
    """All systems at one cache size with one task.

    Attributes:
        cache: size of the cache, as asked for.
        task: the task.
        sizes: of the model.
        limit_bytes: memory that each limited system had; None: memory was not limited.
        bandwidth_bytes_per_s: what the link can do.
        rows: in the order of the systems.
        contention: how much computing and reading slow each other; None: the link takes nothing from computing.
        prompt_compute_s: seconds to read a prompt with everything in RAM, through the unmodified model's products or this
            library's, whichever take less; median over the prompts. None: the unmodified model was not run.
        token_compute_s: seconds per token of the unmodified model; median over the prompts. None: it was not run.
        taken: what other processes and the host of a virtual machine took of the cores meanwhile; None: not known.
    """

    cache: str
    task: Task
    sizes: Sizes
    limit_bytes: int | None
    bandwidth_bytes_per_s: float
    rows: Sequence[Row]
    contention: Contention | None = None
    prompt_compute_s: float | None = None
    token_compute_s: float | None = None
    taken: Taken | None = None

    def row(self, name: str) -> Row | None:
        """Return the row of a system; None if it has no answers."""
        return next((row for row in self.rows if row.system.name == name and row.answers), None)

    def speedup(self, slow: Row, fast: Row) -> Estimate:
        """Return how many times as fast one row is, paired by prompt: to the first token, or per token after it."""
        times = ttfts_s if self.task.reads else tpots_s
        count = min(len(slow.answers), len(fast.answers))
        return paired_speedup(times(slow.answers[:count]), times(fast.answers[:count]))

    def over_16_bits(self, row: Row) -> Estimate | None:
        """Return the time of a quantised row over that of the same system in 16 bits, paired by prompt; None: it has none."""
        plain = self.row(row.system.in_16_bits) if row.system.is_quantised else None
        return None if plain is None or not row.answers else self.speedup(row, plain)

    def over_resident(self, row: Row) -> Estimate | None:
        """Return the time of a row over that of the unmodified model in memory, paired by prompt; None: one has no answers."""
        resident = self.row(RESIDENT)
        return None if resident is None or not row.answers else self.speedup(row, resident)

    def runs(self) -> list[Run]:
        """Return the rows with answers as runs of a report.

        The intervals of TPOT leave out what slows a prompt for all systems alike (`paired_estimates`).
        """
        rows = [row for row in self.rows if row.answers]
        most = max((len(row.answers) for row in rows), default=0)
        tpots = {row.system.name: row.tpot for row in rows}
        tpots |= paired_estimates(
            {row.system.name: tpots_s(row.answers) for row in rows if len(row.answers) == most and _decoded(row)}
        )
        return [self._run(row, tpots[row.system.name]) for row in rows]

    def _run(self, row: Row, tpot: Estimate) -> Run:
        return Run(
            row.system.name,
            nothing_counted(self.sizes) if row.stats is None else row.stats,
            tpot_s=tpot.value,
            tpot_interval_s=(tpot.low, tpot.high) if len(row.answers) > 1 else None,
            ttft_s=row.ttft.value,
            bound_s=row.tpot_bound_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "cache": self.cache,
            "task": self.task.name,
            "limit_bytes": self.limit_bytes,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "prompt_compute_s": self.prompt_compute_s,
            "contention": None if self.contention is None else asdict(self.contention),
            "cores_taken": None if self.taken is None else asdict(self.taken),
            "rows": [row.to_json() | self._ratios_to_json(row) for row in self.rows],
        }

    def _ratios_to_json(self, row: Row) -> dict[str, Any]:
        ratios = {"over_16_bits": self.over_16_bits(row), "over_resident": self.over_resident(row)}
        return {
            name: None if found is None or not is_number(found.value) else found._asdict()
            for name, found in ratios.items()
        }


@dataclass(frozen=True)
class Report:
    """Everything that `promoe bench` measured.

    Attributes:
        model: name of its folder.
        options: what was asked for.
        threads: that computed.
        sizes: of the model.
        not_limited: why memory was not limited; None: it was.
        link: one line about it.
        tables: one per cache size and task.
    """

    model: str
    options: Options
    threads: int
    sizes: Sizes
    not_limited: str | None
    link: str
    tables: Sequence[Table]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dump`."""
        return {
            "model": self.model,
            "cache": list(self.options.cache),
            "threads": self.threads,
            "dtype": self.options.dtype,
            "link": self.link,
            "experts_bytes": self.sizes.experts_bytes,
            "other_bytes": self.sizes.other_bytes,
            "token_bytes": self.sizes.token_bytes,
            "pairs": self.options.pairs,
            "memory_not_limited_because": self.not_limited,
            "tables": [table.to_json() for table in self.tables],
        }


def nothing_counted(sizes: Sizes) -> Stats:
    """Return the statistics of a model that fetches nothing: all zero, every expert in memory."""
    return Stats.of(
        Recorder(sizes.num_experts, sizes.expert_bytes),
        cache_slots=sum(sizes.num_experts),
        cache_bytes=sizes.experts_bytes,
        link="none: the unmodified model",
        policy="none",
        predictor=None,
    )


def _decoded(row: Row) -> bool:
    return all(map(is_number, tpots_s(row.answers)))


def _known(value: float) -> float | None:
    return value if is_number(value) else None
