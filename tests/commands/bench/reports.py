"""A report of `promoe bench` that nobody measured, to be shown and drawn."""

from __future__ import annotations

from dataclasses import replace

from promoe.commands.bench.messages import Sizes
from promoe.commands.bench.options import Options
from promoe.commands.bench.systems import KNOWN, System, find_systems
from promoe.commands.bench.table import Report, Row, Table, nothing_counted
from promoe.commands.bench.tasks import GENERATE, Task
from promoe.commands.measure import Generation
from promoe.stats.counts import PhaseStats

READ = "prompts of 64 tokens"
SIZES = Sizes((8, 8), (1000, 1000), (2, 2), 5000, 64)


def generation(ttft_s: float, tpot_s: float, tokens: int = 5) -> Generation:
    return Generation(tuple(range(tokens)), ttft_s, (tpot_s,) * (tokens - 1))


def system_of(name: str) -> System:
    """The system of this name, which may have a form of experts."""
    return next(system for system in find_systems([name, "static"]) if system.name == name)


def row(name: str, *tpots_s: float, bound_s: float | None = None, ttft_s: float = 0.5, tokens: int = 5) -> Row:
    system = system_of(name)
    ours = system.is_ours
    phase = PhaseStats(passes=4, tokens=4, duration_s=1.0)
    counted = replace(nothing_counted(SIZES), prefill=phase, decode=phase, cache_slots=4)
    return Row(
        system,
        [generation(ttft_s, tpot_s, tokens) for tpot_s in tpots_s],
        ttft_bound_s=0.25 if ours else None,
        tpot_bound_s=bound_s,
        stats=counted if ours else None,
        peak_rss_bytes=500 * 2**20,
        peak_limited_bytes=None if name == "resident" else 130 * 2**20,
    )


def table(cache: str = "25%", task: str = GENERATE) -> Table:
    tokens = 5 if task == GENERATE else 1
    return Table(
        cache,
        Task(task, []),
        SIZES,
        140 * 2**20,
        1.5e9,
        [
            row("resident", 0.05, 0.06, 0.055, tokens=tokens),
            row("on-demand", 0.2, 0.21, 0.22, bound_s=0.1, tokens=tokens),
            row("gate", 0.1, 0.11, 0.12, bound_s=0.1, tokens=tokens),
            row("page-cache", 0.4, 0.5, 0.6, tokens=tokens),
            Row(KNOWN["airllm"], error="The system 'airllm' was killed."),
        ],
    )


def report(*tables: Table, not_limited: str | None = None) -> Report:
    options = Options(cache=["25%"], systems=["gate"])
    return Report("tiny", options, 2, SIZES, not_limited, "the disk", tables or (table(),))
