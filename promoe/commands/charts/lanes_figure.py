"""Draws passes as lanes with matplotlib: computing, waiting, and what each reader of the link fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from promoe.errors import ConfigError
from promoe.stats.figure_style import GRID, HATCHED, INK, MEANING, SOFT, new_figure, plain, set_title
from promoe.stats.lanes import Lanes
from promoe.stats.tracing import LINK_IN_FORWARD
from promoe.units import format_seconds, format_share, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTING, WAITING = "computing", "waiting"
PREDICTOR = "predictor"
# (colour, name in the legend), in the order of the legend.
_PARTS = (
    ("compute", "experts"),
    ("rest", "all else"),
    ("stall", "waiting for experts"),
    ("demand", "fetched on demand"),
    ("arrived", "fetched ahead of need"),
    ("predict", "predicting"),
)
_COLOUR_OF_CAUSE = {"demand": "demand", "prefetch": "arrived"}
_THICKNESS = 0.68
# Bars that are narrower than this on average, in points, get no white edge: it would cover them.
_NARROW_POINTS, _POINTS_PER_WIDTH = 4.0, 620
_ROW_INCHES, _PANEL_INCHES, _FRAME_INCHES, _WIDTH_INCHES = 0.36, 0.62, 1.15, 9.6
Bar = tuple[float, float]
"""(start, length), in ms."""


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
    rows = [_rows(lanes) for lanes in passes.values()]
    heights = [_ROW_INCHES * len(bars) + _PANEL_INCHES for bars in rows]
    figure, grid = new_figure(len(rows), 1, (_WIDTH_INCHES, sum(heights) + _FRAME_INCHES), heights=heights)
    longest_ms = 1e3 * max(lanes.duration_s for lanes in passes.values())
    for axes, (name, lanes), bars in zip(grid, passes.items(), rows, strict=True):
        axes.set_xlim(0, 1.01 * longest_ms)
        _draw_panel(axes, lanes, bars)
        axes.set_title(f"{name}: {_in_words(lanes)}", loc="left", fontsize=10, color=INK, pad=16)
    grid[-1].set_xlabel("ms since the pass began")
    set_title(figure, title, subtitle)
    _legend(figure, rows)
    return figure


def _in_words(lanes: Lanes) -> str:
    share = format_share(ratio(lanes.stall_s, lanes.duration_s))
    return f"{format_seconds(lanes.duration_s)}, {share} of it waiting"


def _rows(lanes: Lanes) -> dict[str, list[tuple[str, list[Bar]]]]:
    """Return {label of a lane: [(what its bars mean, the bars)]}."""
    rows: dict[str, list[tuple[str, list[Bar]]]] = {
        COMPUTING: [
            ("rest", [(0.0, 1e3 * lanes.duration_s)]),
            ("compute", _bars(lanes.visits)),
            # Waiting happens inside visits: computing stands still there.
            ("paper", _bars(lanes.waits)),
        ],
        WAITING: [("stall", _bars(lanes.waits))],
    }
    for idx, reader in enumerate(lanes.readers, start=1):
        of_reader = [transfer for transfer in lanes.transfers if transfer.reader == reader]
        rows["forward's copies" if reader == LINK_IN_FORWARD else f"reader {idx}"] = [
            (colour, _bars(transfer for transfer in of_reader if transfer.cause == cause))
            for cause, colour in _COLOUR_OF_CAUSE.items()
        ]
    if lanes.predictions:
        rows[PREDICTOR] = [("predict", _bars(lanes.predictions))]
    return rows


def _bars(works: Iterable[Any]) -> list[Bar]:
    return [(1e3 * work.start_s, 1e3 * (work.end_s - work.start_s)) for work in works]


def _mean_ms(bars: Sequence[Bar]) -> float:
    return ratio(sum(length for _, length in bars), len(bars))


def _draw_panel(axes: Axes, lanes: Lanes, rows: Mapping[str, list[tuple[str, list[Bar]]]]) -> None:
    plain(axes)
    axes.grid(visible=False)
    points_per_ms = _POINTS_PER_WIDTH / axes.get_xlim()[1]
    for y, parts in enumerate(rows.values()):
        for part, bars in parts:
            axes.broken_barh(
                bars, (y - _THICKNESS / 2, _THICKNESS), facecolor=MEANING.get(part, "white"), edgecolor="white",
                linewidth=0.4 if _mean_ms(bars) * points_per_ms > _NARROW_POINTS else 0.0, hatch=HATCHED.get(part), zorder=3,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows), color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _number_layers(axes, lanes)


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


def _legend(figure: Figure, rows: Iterable[Mapping[str, list[tuple[str, list[Bar]]]]]) -> None:
    """Draw the legend of what can be seen."""
    from matplotlib.patches import Patch

    drawn = {part for bars_of in rows for parts in bars_of.values() for part, bars in parts if bars}
    handles = [
        Patch(facecolor=MEANING[part], edgecolor="white", hatch=HATCHED.get(part), label=label)
        for part, label in _PARTS
        if part in drawn
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
