"""The quantities by which runs are compared, as columns of a table (text or HTML), and what changed from run to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from promoe.stats.run import Run
from promoe.units import (
    DASH,
    aligned,
    format_megabytes,
    format_ms,
    format_percent,
    format_times,
    is_number,
    ratio,
)

Number = float | None


class Column(NamedTuple):
    """A quantity: its head, unit and meaning, its number in a run, how to write it, and whether less or more is better."""

    head: str
    unit: str
    meaning: str
    number: Callable[[Run], Number]
    write: Callable[[Number], str]
    better: Literal["less", "more", ""] = ""

    def cell(self, run: Run, baseline: Run) -> str:
        """Return a run's number as text. `baseline` is the run that speed is compared with."""
        if self.head == "speed":
            return self.write(ratio(baseline.time_per_token_s, run.time_per_token_s))
        text = self.write(self.number(run))
        if self.head != "TPOT" or run.tpot_interval_s is None:
            return text
        low_s, high_s = run.tpot_interval_s
        return f"{text} [{format_ms(low_s)}, {format_ms(high_s)}]"


def _on_share(run: Run) -> Number:
    return None if run.stats.predictor is None else run.phase.prefetch_on_share


COLUMNS: tuple[Column, ...] = (
    Column(
        "TTFT",
        "ms",
        "time to the first token: the prefill of the prompt",
        lambda r: r.time_to_first_s,
        format_ms,
        "less",
    ),
    Column(
        "TPOT",
        "ms",
        "time per output token after the first; in brackets its 95% interval",
        lambda r: r.time_per_token_s,
        format_ms,
        "less",
    ),
    Column("speed", "", "how many times as fast as the baseline (TPOT)", lambda r: r.time_per_token_s, format_times),
    Column(
        "hit",
        "%",
        "needed experts that were resident when the gate chose them",
        lambda r: r.phase.hit_rate,
        format_percent,
        "more",
    ),
    Column(
        "ready",
        "%",
        "needed experts that had arrived when they were computed",
        lambda r: r.phase.ready_rate,
        format_percent,
        "more",
    ),
    Column(
        "stall",
        "ms",
        "part of TPOT in which compute waited for experts",
        lambda r: r.split("decode")[1],
        format_ms,
        "less",
    ),
    Column(
        "moved",
        "MB/token",
        "traffic of the link (10^6 bytes)",
        lambda r: r.phase.bytes_per_token,
        format_megabytes,
        "less",
    ),
    Column(
        "wasted", "%", "prefetched bytes that were never used", lambda r: r.phase.wasted_share, format_percent, "less"
    ),
    Column("prefetch", "% on", "layer visits during which prefetch was on", _on_share, format_percent),
    Column(
        "bound", "ms", "least TPOT possible: max(compute, missed bytes / bandwidth)", lambda r: r.bound_s, format_ms
    ),
    Column(
        "ratio",
        "",
        "TPOT / bound; 1 is the physical limit",
        lambda r: r.bound_ratio,
        lambda number: format_times(number).removesuffix("x"),
        "less",
    ),
)


def columns_for(runs: Sequence[Run]) -> list[Column]:
    """Return the columns in which at least one run has a value; the speed column only if there are several runs."""
    shown = [c for c in COLUMNS if any(c.cell(run, runs[0]) != DASH for run in runs)]
    return [c for c in shown if c.head != "speed" or len(runs) > 1]


def text_table(runs: Sequence[Run], baseline: Run) -> str:
    """Return the comparison as aligned text, with units in the second line."""
    columns = columns_for(runs)
    lines = [["", *(c.head for c in columns)], ["", *(c.unit for c in columns)]]
    lines += [[run.name, *(c.cell(run, baseline) for c in columns)] for run in runs]
    return "\n".join(aligned(lines))


class Change(NamedTuple):
    """A change from one run to another: as text, and whether it is better (None: neither better nor worse)."""

    text: str
    better: bool | None


def change(column: Column, before: Run, after: Run) -> Change:
    """Return how a quantity changed: shares in percentage points, all others in per cent."""
    old, new = column.number(before), column.number(after)
    if old is None or new is None or not is_number(old) or not is_number(new):
        return Change(DASH, None)
    points = column.unit.startswith("%")
    by = 100 * (new - old) if points else 100 * ratio(new - old, old)
    if not is_number(by):
        return Change(DASH, None)
    text = f"{by:+.1f}".replace("-", "−") + (" points" if points else "%")
    if float(f"{by:.1f}") == 0.0:
        return Change("the same", None)
    return Change(text, None if not column.better else (by > 0) == (column.better == "more"))
