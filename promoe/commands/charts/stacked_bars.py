"""Draws stacked bars, in rows (runs) and in columns (layers, distances), as `<figure>` elements.

A colour means the same thing in every chart. What compute waited for, and what was moved in vain, is hatched too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from promoe.commands.charts.frame import WIDTH, Numbers, figure, sentence
from promoe.commands.charts.svg import Canvas, every, tick_labels, ticks, wrapped
from promoe.units import DASH, is_number

Write = Callable[[float], str]
"""A value with its unit."""


class Series(NamedTuple):
    """One colour of a stacked chart: its css class, its name in the legend, and a value per bar."""

    css: str
    label: str
    values: Sequence[float]


class Rows(NamedTuple):
    """What a chart with one row per run shows beside its bars: one entry per row each, or none."""

    labels: Sequence[str]
    totals: Sequence[str]
    marks: Sequence[float | None] = ()
    mark_label: str = ""
    intervals: Sequence[tuple[float, float] | None] = ()


class Columns(NamedTuple):
    """What the columns of a chart are: the label of the axis, a name each, and maybe a value each that is marked."""

    axis_label: str
    names: Sequence[str]
    marks: Sequence[float] = ()
    mark_label: str = ""
    value_labels: bool = False
    """Whether each column's value is written above it; for few columns."""
    empty: str = ""
    """What is written if all values are zero."""

    @classmethod
    def of_layers(cls, count: int) -> Columns:
        """Return columns for MoE layers."""
        return cls("MoE layer (index)", [str(i) for i in range(count)], empty="zero in every layer")


def stacked_rows(
    title: str,
    subtitle: str,
    rows: Rows,
    series: Sequence[Series],
    axis_label: str,
    write: Write,
    top: float | None = None,
) -> str:
    """Draw horizontal bars, one per run, each with an optional mark (the bound) and confidence interval.

    The name of a run stands above its bar, so that names may be long and bars are not short on a phone.

    Args:
        title: what the chart shows.
        subtitle: one sentence on how to read it.
        rows: labels and marks.
        series: stacked left to right; nan is drawn as nothing.
        axis_label: quantity and unit.
        write: a value with its unit, for hover.
        top: end of the axis; None: fits the values.
    """
    pitch, bar, side = 45, 16, 8
    bottom = pitch * len(rows.labels) + 4
    canvas = Canvas(WIDTH, bottom + 40)
    sums = [sum(_known(s.values[i]) for s in series) for i in range(len(rows.labels))]
    ends = [interval[1] for interval in rows.intervals if interval]
    values = ticks(top or max([*sums, *ends, *(m for m in rows.marks if m is not None)], default=0.0), 4)
    scale = (WIDTH - 2 * side) / (top or values[-1])
    for value, label in zip(values, tick_labels(values), strict=True):
        for i in range(len(rows.labels)):  # beside the bars only: names stand between them
            canvas.line(side + value * scale, pitch * i + 19, side + value * scale, pitch * i + 41, "grid")
        canvas.text(side + value * scale, bottom + 15, label, "tick mid")
    canvas.text(WIDTH / 2, bottom + 34, axis_label, "axis-label mid")
    for i, name in enumerate(rows.labels):
        y = pitch * i + 22
        canvas.text(side, y - 6, wrapped(name, 38, lines=1)[0], "row-label", tip=name)
        canvas.text(WIDTH - side, y - 6, rows.totals[i], "total end")
        x = float(side)
        for s in series:
            width = _known(s.values[i]) * scale
            if width > 0:
                canvas.rect(x, y, width, bar, f"mark {s.css}", f"{name}\n{s.label}: {write(s.values[i])}")
            x += width
        _extras(canvas, rows, i, y, bar, side, scale, write)
        canvas.line(side, y - 3, side, y + bar + 3, "axis")
    legend = _legend(series)
    if any(m is not None for m in rows.marks):
        legend.append(("k-bound", rows.mark_label))
    if any(rows.intervals):
        legend.append(("k-interval", "95% interval"))
    spoken = sentence(title, (f"{name} {total}" for name, total in zip(rows.labels, rows.totals, strict=True)))
    more: dict[str, list[str]] = {}
    if any(rows.marks):
        more[rows.mark_label] = [_written(mark, write) for mark in rows.marks]
    if any(rows.intervals):
        more["95% interval"] = [f"{write(i[0])} to {write(i[1])}" if i else DASH for i in rows.intervals]
    numbers = _numbers("run", rows.labels, series, write, more)
    return figure(title, subtitle, legend, canvas.render(spoken), numbers, css="rows")


def _extras(canvas: Canvas, rows: Rows, i: int, y: float, bar: float, left: float, scale: float, write: Write) -> None:
    """Draw row i's interval and mark."""
    interval = rows.intervals[i] if rows.intervals else None
    if interval is not None:
        low, high = (left + value * scale for value in interval)
        tip = f"{rows.labels[i]}\n95% interval: {write(interval[0])} to {write(interval[1])}"
        middle, cap = y + bar / 2, f"{y + 4:.1f}v{bar - 8:.1f}"
        canvas.path(f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {cap}M{high:.1f} {cap}", "interval", tip)
    mark = rows.marks[i] if rows.marks else None
    if mark is not None:
        x = left + mark * scale
        canvas.line(x, y - 3, x, y + bar + 3, "bound-halo")
        canvas.line(x, y - 3, x, y + bar + 3, "bound", f"{rows.labels[i]}\n{rows.mark_label}: {write(mark)}")


def stacked_columns(
    title: str,
    subtitle: str,
    columns: Columns,
    series: Sequence[Series],
    axis_label: str,
    write: Write,
    top: float | None = None,
    of: str = "",
) -> str:
    """Draw vertical bars, one per MoE layer or distance.

    Args:
        title: what the chart shows.
        subtitle: one sentence on how to read it.
        columns: what they are.
        series: stacked bottom to top, one value per column; nan is drawn as nothing.
        axis_label: quantity and unit.
        write: a value with its unit, for hover.
        top: value that the axis must reach at least, so that several charts can share a scale.
        of: the run's name, if charts of two runs stand beside each other.
    """
    height, left, right, bottom = 214, 52, 6, 170
    canvas = Canvas(WIDTH, height)
    count = len(columns.names)
    sums = [sum(_known(s.values[i]) for s in series) for i in range(count)]
    values = ticks(max([*sums, *columns.marks, top or 0.0]), 4)
    scale = (bottom - 10) / values[-1]
    for value, label in zip(values, tick_labels(values), strict=True):
        canvas.line(left, bottom - value * scale, WIDTH - right, bottom - value * scale, "grid")
        canvas.text(left - 7, bottom - value * scale + 4, label, "tick end")
    pitch = (WIDTH - left - right) / max(1, count)
    bar = min(pitch - max(1.0, pitch * 0.22), 48.0)
    for i, name in enumerate(columns.names):
        middle, y = left + (i + 0.5) * pitch, float(bottom)
        for s in series:
            share = _known(s.values[i]) * scale
            if share > 0:
                tip = f"{columns.axis_label.partition(' (')[0]} {name}\n{s.label}: {write(s.values[i])}"
                canvas.rect(middle - bar / 2, y - share, bar, share, f"mark {s.css}", tip)
            y -= share
        if columns.value_labels:
            canvas.text(middle, y - 5, write(sums[i]), "total mid")
        if columns.marks:
            at = bottom - columns.marks[i] * scale
            tip = f"{columns.mark_label}: {write(columns.marks[i])}"
            canvas.line(middle - bar / 2 - 4, at, middle + bar / 2 + 4, at, "bound", tip)
        if i % every(22 / pitch) == 0:
            canvas.text(middle, bottom + 16, name, "tick mid")
    if columns.empty and not any(sums):
        canvas.text(left + (WIDTH - left - right) / 2, bottom / 2, columns.empty, "tick mid")
    canvas.line(left, bottom, WIDTH - right, bottom, "axis")
    canvas.text(left + (WIDTH - left - right) / 2, height - 8, columns.axis_label, "axis-label mid")
    canvas.text(9, 10 + (bottom - 10) / 2, axis_label, "axis-label mid", rotate=True)
    legend = _legend(series) if len(series) > 1 or columns.marks else []
    if columns.marks:
        legend.append(("k-mark", columns.mark_label))
    spoken = sentence(title, (f"{s.label} {_range(s.values, write)}" for s in _visible(series) or series))
    marks = {columns.mark_label: [_written(mark, write) for mark in columns.marks]} if columns.marks else {}
    numbers = _numbers(columns.axis_label, columns.names, series, write, marks)
    return figure(title, subtitle, legend, canvas.render(spoken), numbers, of=of)


def _numbers(
    head: str, names: Sequence[str], series: Sequence[Series], write: Write, more: dict[str, list[str]]
) -> Numbers:
    """Return a chart as a table: a row per bar, a column per series, then columns of `more`."""
    columns = {s.label: [_written(value, write) for value in s.values] for s in series} | more
    return Numbers(
        [head, *columns], [[name, *(cells[i] for cells in columns.values())] for i, name in enumerate(names)]
    )


def _range(values: Sequence[float], write: Write) -> str:
    known = [value for value in values if is_number(value)]
    if not known:
        return DASH
    low, high = write(min(known)), write(max(known))
    return low if low == high else f"{low} to {high}"


def _written(value: float | None, write: Write) -> str:
    return write(value) if value is not None and is_number(value) else DASH


def _legend(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return the legend of what can be seen: a name without a bar sends the reader searching."""
    return [(s.css, s.label) for s in _visible(series)]


def _visible(series: Sequence[Series]) -> list[Series]:
    return [s for s in series if any(_known(value) > 0 for value in s.values)]


def _known(value: float) -> float:
    return value if is_number(value) else 0.0
