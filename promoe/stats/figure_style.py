"""The style of all matplotlib figures: of training, benchmarks, timelines and notebooks.

Figures have their own canvas, so pyplot and matplotlib's settings do not change. matplotlib is imported when a figure is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from promoe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish (without yellow, which is too pale for lines), and
# a marker for each.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "p", "h")
INK, SOFT, GRID = "#1a2027", "#57616e", "#e4e8ed"
# The meaning of colours in every picture, as in the HTML report (`style`). `rest` is computing outside of experts, and
# `predict` is a predictor's computing.
MEANING = {
    "compute": COLOURS[0],
    "rest": "#bad6eb",
    "predict": SOFT,
    "stall": COLOURS[1],
    "hit": COLOURS[2],
    "arrived": COLOURS[5],
    "demand": COLOURS[4],
    "wasted": COLOURS[3],
    "pending": "#aab3bd",
}
# Stall and waste are hatched, too.
HATCHED = {"stall": "////", "wasted": "\\\\\\\\"}
DPI = 160


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed. Try `pip install 'promoe[viz]'`.")


def new_figure(
    rows: int, columns: int, inches: tuple[float, float], heights: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a white figure and its axes, row by row.

    Args:
        rows: rows of axes.
        columns: columns of axes.
        inches: width and height of the figure.
        heights: heights of the rows, relative to each other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    return figure, list(grid.flat)


def set_title(figure: Figure, title: str, subtitle: str) -> None:
    """Write a bold title, and below it a subtitle: the conditions, or how to read the figure."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    # In the title's second line, which is empty.
    figure.text(0.01, 1 - 0.36 / figure.get_figheight(), subtitle, ha="left", va="center", fontsize=9.5, color=SOFT)


def plain(axes: Axes) -> None:
    """Draw a grid behind the data, and no axis lines but the one at the bottom."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, labelsize=9)
    axes.xaxis.label.set_color(SOFT)
    axes.yaxis.label.set_color(SOFT)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(SOFT)


def percent_axis(axes: Axes, label: str) -> None:
    """Make the y axis go from 0 to 100."""
    axes.set_ylim(0, 102)
    axes.set_ylabel(label)
    plain(axes)
