"""Plots of `promoe bench`: times, bytes and stall against the cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.bench.results import Report, Row, Table
from promoe.bench.systems import RESIDENT
from promoe.bench.tasks import GENERATE
from promoe.training.plots import COLOURS, DPI, GRID, INK, MARKERS, SOFT
from promoe.units import is_number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float | None]


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Draw each task. Returns the files."""
    written = []
    for task in dict.fromkeys(table.task for table in report.tables):
        tables = [table for table in report.tables if table.task == task]
        path = folder / f"{task.replace(' ', '-')}.png"
        _draw(report, tables, path)
        written.append(path)
    return written


def _draw(report: Report, tables: Sequence[Table], path: Path) -> None:
    from matplotlib.figure import Figure

    decode = tables[0].task == GENERATE
    panels: list[tuple[str, str, Value, Value | None, bool]] = [
        (
            "Time to the first token",
            "TTFT, ms",
            lambda r: 1e3 * r.ttft.value,
            _times_1000(lambda r: r.ttft_bound_s),
            True,
        )
    ]
    if decode:
        panels = [
            (
                "Time per output token",
                "TPOT, ms",
                lambda r: 1e3 * r.tpot.value,
                _times_1000(lambda r: r.tpot_bound_s),
                True,
            ),
            *panels,
            (
                "Moved per token",
                "MB",
                lambda r: None if r.decode is None else r.decode.bytes_per_token / 1e6,
                None,
                False,
            ),
            (
                "Share of decode time that waits for experts",
                "%",
                lambda r: None if r.decode is None else 100 * r.decode.stall_share,
                None,
                False,
            ),
        ]
    else:
        panels.append(("Moved per prompt", "MB", _moved_per_prompt, None, False))
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 4.2 * rows + 0.9), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        _panel(axis, tables, *panel)
    figure.suptitle(
        f"{report.model}: {tables[0].task}, experts over {report.link}", fontsize=12, color=INK, x=0.01, ha="left"
    )
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=DPI)


def _times_1000(value: Value) -> Value:
    return lambda row: None if (found := value(row)) is None else 1e3 * found


def _moved_per_prompt(row: Row) -> float | None:
    return None if row.prefill is None else ratio(row.prefill.bytes_total, row.prefill.passes) / 1e6


def _panel(
    axis: Axes, tables: Sequence[Table], title: str, unit: str, value: Value, bound: Value | None, logarithmic: bool
) -> None:
    positions = range(len(tables))
    drawn: list[float] = []
    for number, system in enumerate(row.system for row in tables[0].rows):
        rows = [table.row(system.name) for table in tables]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        points = [
            (x, y)
            for x, row in zip(positions, rows, strict=True)
            if row and is_number(y := value(row)) and y is not None
        ]
        if not points:
            continue
        style = (
            {"color": INK, "linestyle": ":", "linewidth": 1.2}
            if system.name == RESIDENT
            else {"color": colour, "marker": marker}
        )
        axis.plot(*zip(*points, strict=True), label=system.name, markersize=5, **style)
        drawn += [y for _, y in points]
        if bound is not None and system.kind == "promoe":
            least = [(x, y) for x, row in zip(positions, rows, strict=True) if row and (y := bound(row)) is not None]
            if least:
                axis.plot(*zip(*least, strict=True), color=colour, linestyle="", marker="_", markersize=14, alpha=0.7)
                drawn += [y for _, y in least]
    axis.set_title(
        title + (" (dashes: the least possible)" if bound is not None else ""), fontsize=10, color=INK, loc="left"
    )
    axis.set_xticks(list(positions), [table.cache for table in tables])
    axis.set_xlabel("cache, share of the routed experts", fontsize=9, color=SOFT)
    axis.set_ylabel(unit, fontsize=9, color=SOFT)
    if logarithmic and drawn and max(drawn) > 5 * min(drawn):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
