"""Draws what `promoe bench` found: times, bytes and stall by cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from promoe.commands.bench.systems import RESIDENT
from promoe.commands.bench.table import Report, Row, Table
from promoe.stats.figure_style import COLOURS, DPI, INK, MARKERS, new_figure, plain, set_title
from promoe.units import is_number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class _Panel(NamedTuple):
    """One diagram: its title and unit, the value of a row, and the physical bound of that value if there is one."""

    title: str
    unit: str
    value: Callable[[Row], float | None]
    bound: Callable[[Row], float | None] | None = None


_TTFT = _Panel("Time to the first token", "TTFT, ms", lambda r: 1e3 * r.ttft.value, lambda r: _ms(r.ttft_bound_s))
_GENERATE = (
    _Panel("Time per output token", "TPOT, ms", lambda r: 1e3 * r.tpot.value, lambda r: _ms(r.tpot_bound_s)),
    _TTFT,
    _Panel("Moved per token", "MB", lambda r: None if r.decode is None else r.decode.bytes_per_token / 1e6),
    _Panel(
        "Decode time that waits for experts", "%", lambda r: None if r.decode is None else 100 * r.decode.stall_share
    ),
)
_READ = (_TTFT, _Panel("Moved per prompt", "MB", lambda r: _moved_per_prompt(r)))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _moved_per_prompt(row: Row) -> float | None:
    return None if row.prefill is None else ratio(row.prefill.bytes_total, row.prefill.passes) / 1e6


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Draw each task into a PNG file.

    Returns:
        The files.
    """
    written = []
    for task in dict.fromkeys(table.task.name for table in report.tables):
        path = folder / f"{task.replace(' ', '-')}.png"
        _draw(report, [table for table in report.tables if table.task.name == task], path)
        written.append(path)
    return written


def _draw(report: Report, tables: Sequence[Table], path: Path) -> None:
    panels = _READ if tables[0].task.reads else _GENERATE
    rows = -(-len(panels) // 2)
    figure, axes = new_figure(rows, 2, (11, 4.0 * rows + 0.9))
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(axis, tables, panel)
    set_title(
        figure, f"{report.model}: {tables[0].task.name}", f"Experts over {report.link}; dashes: the least possible."
    )
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)


def _draw_panel(axis: Axes, tables: Sequence[Table], panel: _Panel) -> None:
    drawn: list[float] = []
    for number, system in enumerate(row.system for row in tables[0].rows):
        rows = [table.row(system.name) for table in tables]
        resident = system.name == RESIDENT
        colour = INK if resident else COLOURS[number % len(COLOURS)]
        if points := _points(rows, panel.value):
            axis.plot(
                *zip(*points, strict=True),
                label=system.name,
                color=colour,
                marker="x" if resident else MARKERS[number % len(MARKERS)],
                linestyle=":" if resident else "-",
                markersize=5,
            )
        least = _points(rows, panel.bound) if panel.bound is not None and system.is_ours else []
        if least:
            axis.plot(*zip(*least, strict=True), color=colour, linestyle="", marker="_", markersize=14, alpha=0.7)
        drawn += [value for _, value in points + least]
    axis.set_title(panel.title, fontsize=10, color=INK, loc="left")
    axis.set_xticks(range(len(tables)), [table.cache for table in tables])
    axis.set_xlabel("cache, share of the routed experts", fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=9)
    _scale(axis, drawn, logarithmic=panel.unit != "%")
    plain(axis)


def _points(rows: Sequence[Row | None], value: Callable[[Row], float | None]) -> list[tuple[float, float]]:
    """Return (position, value) of the rows that have a value."""
    found = [(float(position), value(row)) for position, row in enumerate(rows) if row is not None]
    return [(x, y) for x, y in found if y is not None and is_number(y)]


def _scale(axis: Axes, values: Sequence[float], logarithmic: bool) -> None:
    """Begin the y axis at zero, or make it logarithmic if that is allowed and the values differ by more than 5 times."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if not logarithmic or not values or max(values) <= 5 * min(values):
        axis.set_ylim(0, 1.08 * max(values, default=0.0) or 1.0)
        return
    if min(values) <= 0:
        axis.set_ylim(bottom=0)
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.yaxis.set_minor_formatter(NullFormatter())
