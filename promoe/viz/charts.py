"""Charts of the report: stacked bars in rows (runs) and in columns (layers), as `<figure>` elements.

Colour always means the same thing in every chart; what compute waited for, and what was moved in vain, is hatched too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from promoe.units import is_number
from promoe.viz.svg import Canvas, every, tick_labels, ticks, wrapped

WIDTH = 580


class Series(NamedTuple):
    """One colour of a stacked chart: css class, name in the legend, a value per bar."""

    css: str
    label: str
    values: Sequence[float]


class Rows(NamedTuple):
    """What a chart with one row per run shows beside its bars; each with one entry per row, or empty."""

    labels: Sequence[str]
    totals: Sequence[str]
    marks: Sequence[float | None] = ()
    mark_label: str = ""
    intervals: Sequence[tuple[float, float] | None] = ()


def figure(title: str, subtitle: str, legend: Sequence[tuple[str, str]], drawing: str, css: str = "") -> str:
    """A chart with its title, a sentence on what is drawn, and the legend [(css class, name)]."""
    keys = "".join(f'<li><span class="key {css_}"></span>{escape(name)}</li>' for css_, name in legend)
    return (
        f'<figure class="chart {css}"><figcaption><h3>{escape(title)}</h3><p>{escape(subtitle)}</p></figcaption>'
        + (f'<ul class="legend">{keys}</ul>' if keys else "")
        + f"{drawing}</figure>"
    )


def stacked_rows(
    title: str,
    subtitle: str,
    rows: Rows,
    series: Sequence[Series],
    axis_label: str,
    write: Callable[[float], str],
    top: float | None = None,
) -> str:
    """Horizontal bars, one per run, with an optional mark (the bound) and confidence interval per row.

    Args:
        title: what the chart shows.
        subtitle: one sentence on how to read it.
        rows: labels and marks.
        series: stacked left to right; nan is drawn as nothing.
        axis_label: quantity and unit.
        write: a value with its unit, for hover.
        top: end of the axis; None: fits the values.
    """
    pitch, bar, left, right = 38, 20, 172, 70
    bottom = pitch * len(rows.labels) + 8
    canvas = Canvas(WIDTH, bottom + 40)
    sums = [sum(_known(s.values[i]) for s in series) for i in range(len(rows.labels))]
    ends = [interval[1] for interval in rows.intervals if interval]
    values = ticks(top or max([*sums, *ends, *(m for m in rows.marks if m is not None)], default=0.0))
    scale = (WIDTH - left - right) / (top or values[-1])
    for value, label in zip(values, tick_labels(values), strict=True):
        canvas.line(left + value * scale, 4, left + value * scale, bottom, "grid")
        canvas.text(left + value * scale, bottom + 15, label, "tick mid")
    canvas.text(left + (WIDTH - left - right) / 2, bottom + 34, axis_label, "axis-label mid")
    for i, name in enumerate(rows.labels):
        y = 8 + pitch * i + (pitch - bar) / 2 - 4
        lines = wrapped(name, 25)
        for j, line in enumerate(lines):
            canvas.text(left - 12, y + bar / 2 + 4.5 + 15 * (j - (len(lines) - 1) / 2), line, "row-label end", tip=name)
        x = float(left)
        for s in series:
            width = _known(s.values[i]) * scale
            if width > 0:
                canvas.rect(x, y, width, bar, f"mark {s.css}", f"{name}\n{s.label}: {write(s.values[i])}")
            x += width
        right_end = max(x, _extras(canvas, rows, i, y, bar, left, scale, write))
        canvas.text(right_end + 8, y + bar / 2 + 4.5, rows.totals[i], "total")
    canvas.line(left, 4, left, bottom, "axis")
    legend = _legend(series)
    if any(m is not None for m in rows.marks):
        legend.append(("k-bound", rows.mark_label))
    if any(rows.intervals):
        legend.append(("k-interval", "95% interval"))
    return figure(title, subtitle, legend, canvas.render(title))


def _extras(
    canvas: Canvas, rows: Rows, i: int, y: float, bar: float, left: float, scale: float, write: Callable[[float], str]
) -> float:
    """Draw row i's interval and mark; returns the rightmost x."""
    end = 0.0
    interval = rows.intervals[i] if rows.intervals else None
    if interval is not None:
        low, high = (left + value * scale for value in interval)
        tip = f"{rows.labels[i]}\n95% interval: {write(interval[0])} to {write(interval[1])}"
        middle, cap = y + bar / 2, f"{y + 6:.1f}v{bar - 12:.1f}"
        canvas.path(f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {cap}M{high:.1f} {cap}", "interval", tip)
        end = high
    mark = rows.marks[i] if rows.marks else None
    if mark is not None:
        x = left + mark * scale
        canvas.line(x, y - 5, x, y + bar + 5, "bound-halo")
        canvas.line(x, y - 5, x, y + bar + 5, "bound", f"{rows.labels[i]}\n{rows.mark_label}: {write(mark)}")
        end = max(end, x)
    return end


def stacked_columns(
    title: str,
    subtitle: str,
    series: Sequence[Series],
    axis_label: str,
    write: Callable[[float], str],
    top: float | None = None,
) -> str:
    """Vertical bars, one per MoE layer.

    Args:
        title: what the chart shows.
        subtitle: one sentence on how to read it.
        series: stacked bottom to top, one value per layer; nan is drawn as nothing.
        axis_label: quantity and unit.
        write: a value with its unit, for hover.
        top: value that the axis must reach at least, so that several charts can share a scale.
    """
    height, left, right, bottom = 236, 56, 8, 192
    canvas = Canvas(WIDTH, height)
    layers = len(series[0].values)
    sums = [sum(_known(s.values[i]) for s in series) for i in range(layers)]
    values = ticks(max([*sums, top or 0.0]), 4)
    scale = (bottom - 10) / values[-1]
    for value, label in zip(values, tick_labels(values), strict=True):
        canvas.line(left, bottom - value * scale, WIDTH - right, bottom - value * scale, "grid")
        canvas.text(left - 8, bottom - value * scale + 4, label, "tick end")
    pitch = (WIDTH - left - right) / max(1, layers)
    gap = max(1.0, pitch * 0.22)
    label_step = every(22 / pitch)
    for i in range(layers):
        y = float(bottom)
        for s in series:
            share = _known(s.values[i]) * scale
            if share > 0:
                tip = f"layer {i}\n{s.label}: {write(s.values[i])}"
                canvas.rect(left + i * pitch + gap / 2, y - share, pitch - gap, share, f"mark {s.css}", tip)
            y -= share
        if i % label_step == 0:
            canvas.text(left + (i + 0.5) * pitch, bottom + 16, str(i), "tick mid")
    if not any(sums):
        canvas.text(left + (WIDTH - left - right) / 2, bottom / 2, "zero in every layer", "tick mid")
    canvas.line(left, bottom, WIDTH - right, bottom, "axis")
    canvas.text(left + (WIDTH - left - right) / 2, height - 8, "MoE layer (index)", "axis-label mid")
    canvas.text(14, 10 + (bottom - 10) / 2, axis_label, "axis-label mid", rotate=True)
    legend = _legend(series) if len(series) > 1 else []
    return figure(title, subtitle, legend, canvas.render(title))


def _legend(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Only what can be seen: a name without a bar sends the reader searching."""
    return [(s.css, s.label) for s in series if any(_known(value) > 0 for value in s.values)]


def _known(value: float) -> float:
    return value if is_number(value) else 0.0
