"""Draws an evaluation as PNG files. It does not use pyplot, nor change matplotlib's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.errors import ConfigError
from promoe.files import make_folder
from promoe.stats.figure_style import (
    COLOURS,
    DPI,
    INK,
    MARKERS,
    SOFT,
    check_matplotlib,
    new_figure,
    percent_axis,
    set_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_PER_ROW = 2
BRIER = ", Brier "

Result = dict[str, Any]
Series = tuple[str, Sequence[float], Sequence[float]]
"""(label, x, y) of one line."""


def check_plots(folder: Path) -> None:
    """Make the folder; raise ConfigError if that cannot be done or matplotlib is not installed."""
    check_matplotlib()
    make_folder(folder)


def save_plots(result: Result, folder: Path, subject: str) -> list[Path]:
    """Draw every plot for which there is something to draw.

    Args:
        result: result of `evaluate.judge`.
        folder: the folder for the files.
        subject: what was judged, for the titles.

    Returns:
        The files.
    """
    plots: dict[str, Callable[[Result, str], Figure | None]] = {
        "accuracy.png": draw_accuracy,
        "accuracy_by_layer.png": draw_layers,
        "calibration.png": draw_calibration,
    }
    written = []
    for name, draw in plots.items():
        figure = draw(result, subject)
        if figure is not None:
            try:
                figure.savefig(folder / name, dpi=DPI)
            except OSError as error:
                raise ConfigError(f"Cannot write '{folder / name}': {error.strerror or error}.") from error
            written.append(folder / name)
    return written


def draw_accuracy(result: Result, subject: str) -> Figure | None:
    """Draw accuracy by lookahead, a line per kind, dashed if it is the same for every lookahead. None: nothing is predicted."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for kind, by_lookahead in result.items():
        known = {int(k): 100 * f["accuracy"] for k, f in by_lookahead.items() if f["accuracy"] is not None}
        if known:
            lines[kind] = (sorted(known), [known[k] for k in sorted(known)])
    if not lines:
        return None
    figure, (axes,) = new_figure(1, 1, (7.6, 4.4))
    for kind, (x, y) in lines.items():
        constant = len(y) > 1 and len(set(y)) == 1
        axes.plot(x, y, **_style(result, kind) | ({"linestyle": (0, (4, 2)), "linewidth": 1.2} if constant else {}))
    percent_axis(axes, "experts used that are predicted, %")
    axes.set_xlabel("lookahead k, MoE layers", color=SOFT)
    ks = sorted({k for x, _ in lines.values() for k in x})
    axes.set_xticks(ks, [str(k) for k in ks])
    set_title(figure, "Accuracy by lookahead", f"{subject}, held-out prompts; dashed: the same for every k")
    order = sorted(range(len(lines)), key=lambda i: -list(lines.values())[i][1][-1])
    _legend_beside(figure, [axes], order)
    return figure


def draw_layers(result: Result, subject: str) -> Figure | None:
    """Draw the accuracy of each layer, a panel per lookahead. None: nothing is predicted."""
    panels: dict[str, list[Series]] = {}
    for lookahead, kind, figures in _each(result):
        points = [(i, 100 * value) for i, value in enumerate(figures["layers"]) if value is not None]
        if points:
            x, y = zip(*points, strict=True)
            panels.setdefault(lookahead, []).append((kind, x, y))
    if not panels:
        return None
    figure, grid = _panels(result, panels, "MoE layer", "experts used that are predicted, %", 3.1, 1.4)
    set_title(figure, "Accuracy by layer", f"{subject}, held-out prompts")
    _legend_beside(figure, grid)
    return figure


def draw_calibration(result: Result, subject: str) -> Figure | None:
    """Draw the share used by the probability given, a panel per lookahead. None: no kind gives probabilities."""
    panels: dict[str, list[Series]] = {}
    for lookahead, kind, figures in _each(result):
        calibration = figures["calibration"]
        if calibration:
            x, y = ([100 * value for value in calibration[name]] for name in ("predicted", "observed"))
            panels.setdefault(lookahead, []).append((f"{kind}{BRIER}{calibration['brier']:.3f}", x, y))
    if not panels:
        return None
    figure, grid = _panels(result, panels, "probability given, %", "experts used, %", 4.1)
    for axes in grid:
        axes.plot([0, 100], [0, 100], color=SOFT, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
        axes.set_xlim(0, 102)
        axes.set_aspect("equal")
        axes.legend(fontsize=8, frameon=False, loc="upper left", labelcolor=INK)
    set_title(figure, "Calibration", f"{subject}, held-out prompts; dotted: what is given probability p is used with p")
    return figure


def _each(result: Result) -> Iterator[tuple[str, str, Any]]:
    for kind, by_lookahead in result.items():
        for lookahead, figures in by_lookahead.items():
            yield lookahead, kind, figures


def _panels(
    result: Result, panels: dict[str, list[Series]], x_label: str, y_label: str, height: float, beside: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Draw a panel per lookahead, `height` inches high, with `beside` inches of room beside them."""
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(rows, columns, (4.1 * columns + beside, height * rows + 0.6))
    for i, (lookahead, lines) in enumerate(panels.items()):
        axes = grid[i]
        for label, x, y in lines:
            axes.plot(x, y, **_style(result, label.partition(BRIER)[0]) | {"label": label})
        percent_axis(axes, y_label if i % columns == 0 else "")
        axes.set_xlabel(x_label if i + columns >= len(panels) else "", color=SOFT)
        axes.set_title(f"k = {lookahead}", loc="left", fontsize=10, color=INK)
        axes.locator_params(axis="x", integer=True)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure, grid[: len(panels)]


def _style(result: Result, kind: str) -> dict[str, Any]:
    """Return the style of a kind's lines, the same in all plots."""
    again, i = divmod(list(result).index(kind), len(COLOURS))
    return {
        "label": kind,
        "color": COLOURS[i],
        "marker": MARKERS[i],
        "markersize": 5.5,
        "markerfacecolor": "white" if again else COLOURS[i],
        "markeredgecolor": COLOURS[i] if again else "white",
        "markeredgewidth": 1.2 if again else 0.6,
        "linewidth": 1.7,
        "zorder": 3,
    }


def _legend_beside(figure: Figure, grid: Sequence[Axes], order: Sequence[int] | None = None) -> None:
    """Draw one legend for the lines of all panels."""
    handles: dict[Any, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [list(handles)[i] for i in (range(len(handles)) if order is None else order)]
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside right center", frameon=False, fontsize=9.5,
        labelcolor=INK,
    )  # fmt: skip
