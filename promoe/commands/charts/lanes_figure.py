"""Draws passes as lanes with matplotlib: computing, waiting, and what each reader of the link fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from promoe.commands.charts.token_lanes import Lane, lanes_of
from promoe.errors import ConfigError
from promoe.stats.figure_style import GRID, HATCHED, INK, MEANING, SOFT, new_figure, plain, set_title
from promoe.stats.lanes import Lanes
from promoe.units import format_seconds, format_share, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (colour, name in the legend) of each kind of bar, in the order of the legend.
_PARTS = {
    "compute": ("compute", "experts"),
    "rest": ("rest", "all else"),
    "waited": ("stall", "waiting for experts"),
    "demand": ("demand", "fetched on demand"),
    "arrived": ("arrived", "fetched ahead of need"),
    "predict": ("predict", "predicting"),
}
_THICKNESS = 0.68
# Bars that are narrower than this on average, in points, get no white edge: it would cover them.
_NARROW_POINTS, _POINTS_PER_WIDTH = 4.0, 620
_ROW_INCHES, _PANEL_INCHES, _FRAME_INCHES, _WIDTH_INCHES = 0.36, 0.62, 1.15, 9.6


def draw_lanes(passes: Mapping[str, Lanes], title: str, subtitle: str) -> Figure:
    """Draw one or more passes, a panel each, with one scale for all.

    Args:
        passes: by name; a panel each, from top to bottom.
        title: what is shown.
        subtitle: the conditions.

    Returns:
        The figure. A notebook shows it after `%matplotlib inline`; elsewhere call `figure.savefig(path)`.

    Raises:
        ConfigError: there is no pass to draw; matplotlib is not installed.
    """
    if not passes:
        raise ConfigError("A picture of lanes needs at least one pass. Got none.")
    panels = [list(lanes_of(token)) for token in passes.values()]
    heights = [_ROW_INCHES * len(lanes) + _PANEL_INCHES for lanes in panels]
    figure, grid = new_figure(len(panels), 1, (_WIDTH_INCHES, sum(heights) + _FRAME_INCHES), heights=heights)
    longest_ms = 1e3 * max(token.duration_s for token in passes.values())
    for axes, (name, token), lanes in zip(grid, passes.items(), panels, strict=True):
        axes.set_xlim(0, 1.01 * longest_ms)
        _draw_panel(axes, token, lanes)
        axes.set_title(f"{name}: {_in_words(token)}", loc="left", fontsize=10, color=INK, pad=16)
    grid[-1].set_xlabel("ms since the pass began")
    set_title(figure, title, subtitle)
    _legend(figure, panels)
    return figure


def _in_words(lanes: Lanes) -> str:
    share = format_share(ratio(lanes.stall_s, lanes.duration_s))
    return f"{format_seconds(lanes.duration_s)}, {share} of it waiting"


def _draw_panel(axes: Axes, token: Lanes, lanes: Sequence[Lane]) -> None:
    plain(axes)
    axes.grid(visible=False)
    points_per_ms = _POINTS_PER_WIDTH / axes.get_xlim()[1]
    for y, lane in enumerate(lanes):
        for css in dict.fromkeys(bar.css for bar in lane.bars):
            spans = [(1e3 * bar.start_s, 1e3 * (bar.end_s - bar.start_s)) for bar in lane.bars if bar.css == css]
            meaning, _ = _PARTS.get(css, ("", ""))
            mean_ms = sum(length for _, length in spans) / len(spans)
            axes.broken_barh(
                spans, (y - _THICKNESS / 2, _THICKNESS), facecolor=MEANING.get(meaning, "white"), edgecolor="white",
                linewidth=0.4 if mean_ms * points_per_ms > _NARROW_POINTS else 0.0, hatch=HATCHED.get(meaning), zorder=3,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [lane.name.removeprefix("link, ") for lane in lanes], color=INK)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    _number_layers(axes, token)


def _number_layers(axes: Axes, lanes: Lanes) -> None:
    """Draw a line where each layer ends, and its number above its part."""
    above: dict[str, Any] = {"textcoords": "offset points", "xytext": (0, 2), "fontsize": 8, "color": SOFT}
    if lanes.visits:
        axes.annotate("layer ", (0, 1), xycoords="axes fraction", ha="right", **above)
    begin_ms = 0.0
    for visit in lanes.visits:
        end_ms = 1e3 * visit.end_s
        axes.axvline(end_ms, color=GRID, linewidth=0.8, zorder=1)
        place = ((begin_ms + end_ms) / 2, 1.0)
        axes.annotate(str(visit.layer), place, xycoords=("data", "axes fraction"), ha="center", **above)
        begin_ms = end_ms


def _legend(figure: Figure, panels: Iterable[Sequence[Lane]]) -> None:
    """Draw the legend of what can be seen."""
    from matplotlib.patches import Patch

    drawn = {bar.css for lanes in panels for lane in lanes for bar in lane.bars}
    handles = [
        Patch(facecolor=MEANING[meaning], edgecolor="white", hatch=HATCHED.get(meaning), label=label)
        for css, (meaning, label) in _PARTS.items()
        if css in drawn
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
