"""What `promoe bench` found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from promoe.commands.bench.options import Options
from promoe.commands.bench.systems import System
from promoe.commands.bench.worker import Sizes
from promoe.commands.contention import Contention
from promoe.commands.measure import Estimate, Generation, estimate, paired_speedup, tpots_s, ttfts_s
from promoe.stats.counts import PhaseStats
from promoe.transfer.cpu_contention import Taken
from promoe.units import is_number


@dataclass
class Row:
    """One system at one cache size with one task.

    Attributes:
        system: which.
        answers: one per measured prompt, in order; fewer where it failed.
        ttft_bound_s: least possible, median over the prompts; None for systems that are not this library's.
        tpot_bound_s: likewise.
        tpot_unmodified_s: the same where computing takes as long as in the unmodified model; None: experts are not packed.
        tpot_shared_s: the same where computing and reading slow each other as measured; None: they do not.
        prefill: what this library counted while it read prompts.
        decode: what it counted while it generated.
        peak_rss_bytes: of its process, libraries and mapped files included.
        peak_limited_bytes: the most that counted against the limit at once.
        error: why it has no (more) answers.
    """

    system: System
    answers: list[Generation] = field(default_factory=list)
    ttft_bound_s: float | None = None
    tpot_bound_s: float | None = None
    tpot_unmodified_s: float | None = None
    tpot_shared_s: float | None = None
    prefill: PhaseStats | None = None
    decode: PhaseStats | None = None
    peak_rss_bytes: int | None = None
    peak_limited_bytes: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> Estimate:
        """Seconds to the first token: median over prompts and its interval."""
        return estimate(ttfts_s(self.answers))

    @property
    def tpot(self) -> Estimate:
        """Seconds per token after the first: median over prompts and its interval; nan where only one was generated."""
        return estimate([tpot_s for tpot_s in tpots_s(self.answers) if is_number(tpot_s)])

    def to_json(self) -> dict[str, Any]:
        """Plain values; every answer's times too."""
        return {
            "system": self.system.name,
            "meaning": self.system.meaning,
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
        cache: as asked for.
        task: its name.
        limit_bytes: what each limited system might use; None: memory was not limited.
        bandwidth_bytes_per_s: what the link can do, measured before and after.
        rows: in the order of the systems.
        contention: what computing and reading lose to each other; None: the link takes nothing from computing.
        prompt_compute_s: reading a prompt with everything in RAM, through the unmodified model's products or this library's,
            whichever take less; median over the prompts.
        taken: what other processes and a virtual machine's host took of the cores meanwhile; None: the system does not say.
    """

    cache: str
    task: str
    limit_bytes: int | None
    bandwidth_bytes_per_s: float
    rows: Sequence[Row]
    contention: Contention | None = None
    prompt_compute_s: float | None = None
    taken: Taken | None = None

    def row(self, name: str) -> Row | None:
        """The row of a system that has answers; None: there is none."""
        return next((row for row in self.rows if row.system.name == name and row.answers), None)

    def speedup(self, slow: Row, fast: Row, phase: str) -> Estimate:
        """How many times as fast one row is, paired by prompt: in "decode" per token, in "prefill" to the first."""
        times = tpots_s if phase == "decode" else ttfts_s
        count = min(len(slow.answers), len(fast.answers))
        return paired_speedup(times(slow.answers[:count]), times(fast.answers[:count]))


@dataclass(frozen=True)
class Report:
    """Everything that was measured.

    Attributes:
        model: its folder's name.
        options: what was asked for.
        threads: that computed.
        sizes: of the model.
        not_limited: why memory was not limited; None: it was.
        link: in words.
        tables: per cache size and task.
    """

    model: str
    options: Options
    threads: int
    sizes: Sizes
    not_limited: str | None
    link: str
    tables: Sequence[Table]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
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
            "tables": [
                {
                    "cache": table.cache,
                    "task": table.task,
                    "limit_bytes": table.limit_bytes,
                    "bandwidth_bytes_per_s": table.bandwidth_bytes_per_s,
                    "prompt_compute_s": table.prompt_compute_s,
                    "contention": None if table.contention is None else asdict(table.contention),
                    "cores_taken": None if table.taken is None else asdict(table.taken),
                    "rows": [row.to_json() for row in table.rows],
                }
                for table in self.tables
            ],
        }


# Two that do not hinder each other: of nothing but max(compute, transfer).
_APART = Contention(1.0, math.inf)


def median_bound(
    compute_s: Sequence[float], nbytes: Sequence[float], bandwidth_bytes_per_s: float, contention: Contention = _APART
) -> float | None:
    """Median over prompts of the least possible time: it bounds the median of times, since each bounds its own."""
    bounds = [
        contention.token_s(*pair, bandwidth_bytes_per_s)
        for pair in zip(compute_s, nbytes, strict=True)
        if all(map(is_number, pair))
    ]
    return median(bounds) if bounds else None


def _known(value: float) -> float | None:
    return value if is_number(value) else None
