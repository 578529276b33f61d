"""The table that compares runs, once for text and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from promoe.units import (
    DASH,
    aligned,
    format_megabytes,
    format_ms,
    format_percent,
    format_times,
    ratio,
)
from promoe.viz.run import Run


class Column(NamedTuple):
    """A column: head, unit, what it means, and how a run's cell is written."""

    head: str
    unit: str
    meaning: str
    cell: Callable[[Run, Run], str]  # (run, baseline)


def _tpot(run: Run, _: Run) -> str:
    text = format_ms(run.time_per_token_s)
    if run.tpot_interval_s is None:
        return text
    low_s, high_s = run.tpot_interval_s
    return f"{text} [{format_ms(low_s)}, {format_ms(high_s)}]"


def _speed(run: Run, baseline: Run) -> str:
    return format_times(ratio(baseline.time_per_token_s, run.time_per_token_s))


def _ratio(run: Run, _: Run) -> str:
    return format_times(run.bound_ratio).removesuffix("x")


COLUMNS: tuple[Column, ...] = (
    Column(
        "TTFT", "ms", "time to the first token: the prefill of the prompt", lambda r, _: format_ms(r.time_to_first_s)
    ),
    Column("TPOT", "ms", "time per output token after the first; in brackets its 95% interval", _tpot),
    Column("speed", "", "how many times as fast as the baseline (TPOT)", _speed),
    Column(
        "hit",
        "%",
        "needed experts that were resident when the gate chose them",
        lambda r, _: format_percent(r.phase.hit_rate),
    ),
    Column(
        "ready",
        "%",
        "needed experts that had arrived when they were computed",
        lambda r, _: format_percent(r.phase.ready_rate),
    ),
    Column(
        "stall", "ms", "part of TPOT in which compute waited for experts", lambda r, _: format_ms(r.split("decode")[1])
    ),
    Column(
        "moved", "MB/token", "traffic of the link (10^6 bytes)", lambda r, _: format_megabytes(r.phase.bytes_per_token)
    ),
    Column("wasted", "%", "prefetched bytes that were never used", lambda r, _: format_percent(r.phase.wasted_share)),
    Column("prefetch", "% on", "layer visits during which prefetch was on", lambda r, _: format_percent(_on_share(r))),
    Column(
        "bound", "ms", "least TPOT possible: max(compute, missed bytes / bandwidth)", lambda r, _: format_ms(r.bound_s)
    ),
    Column("ratio", "", "TPOT / bound; 1 is the physical limit", _ratio),
)


def columns_for(runs: Sequence[Run]) -> list[Column]:
    """The columns in which at least one run has a value; the speed column only where there is something to compare."""
    shown = [c for c in COLUMNS if any(c.cell(run, runs[0]) != DASH for run in runs)]
    return [c for c in shown if c.head != "speed" or len(runs) > 1]


def text_table(runs: Sequence[Run], baseline: Run) -> str:
    """The comparison as aligned text, units in the second line."""
    columns = columns_for(runs)
    lines = [["", *(c.head for c in columns)], ["", *(c.unit for c in columns)]]
    lines += [[run.name, *(c.cell(run, baseline) for c in columns)] for run in runs]
    return "\n".join(aligned(lines))


def _on_share(run: Run) -> float | None:
    return None if run.stats.predictor is None else run.phase.prefetch_on_share
