from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from matplotlib.colors import to_hex

from promoe.commands.charts.lanes_figure import draw_lanes
from promoe.errors import ConfigError
from promoe.stats.figure_style import MEANING
from promoe.stats.lanes import Lanes, Transfer, Work
from promoe.stats.tracing import LINK_IN_FORWARD, link_worker

WAITED = Lanes(
    "decode", 1, 0.010,
    visits=[Work(0, 0.001, 0.005), Work(1, 0.006, 0.009)],
    waits=[Work(0, 0.002, 0.004)],
    predictions=[],
    transfers=[
        Transfer(link_worker(0), "demand", 0, 3, 0.001, 0.004),
        Transfer(link_worker(1), "prefetch", 1, 4, 0.004, 0.006),
    ],
)  # fmt: skip
RESIDENT = Lanes("decode", 1, 0.005, [Work(0, 0.001, 0.002), Work(1, 0.003, 0.004)], [], [], [])


def bars(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Colour -> [(from, to)] in ms, in order of time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            extents = path.get_extents()
            span = (round(extents.x0, 6), round(extents.x1, 6))
            found.setdefault(to_hex(collection.get_facecolor()[0]), []).append(span)
    return {colour: sorted(spans) for colour, spans in found.items()}


def test_every_lane_has_its_bars() -> None:
    figure = draw_lanes({"a token": WAITED}, "Title", "conditions")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["computing", "waiting", "reader 1", "reader 2"]
    drawn = bars(axes)
    assert drawn[MEANING["rest"]] == [(0.0, 10.0)]
    assert drawn[MEANING["compute"]] == [(1.0, 5.0), (6.0, 9.0)]
    assert drawn[MEANING["stall"]] == [(2.0, 4.0)]
    assert drawn["#ffffff"] == [(2.0, 4.0)]  # computing is interrupted where it waits
    assert drawn[MEANING["demand"]] == [(1.0, 4.0)]
    assert drawn[MEANING["arrived"]] == [(4.0, 6.0)]


def test_what_the_forward_copies_itself_is_no_reader() -> None:
    transfer = WAITED.transfers[0]._replace(reader=LINK_IN_FORWARD)
    copied = dataclasses.replace(WAITED, transfers=[*WAITED.transfers, transfer])
    (axes,) = draw_lanes({"a token": copied}, "Title", "conditions").axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["computing", "waiting", "reader 1", "reader 2", "in forward"]


def test_titles_say_what_is_seen() -> None:
    figure = draw_lanes({"a token": WAITED}, "Title", "conditions")
    assert figure.get_suptitle().strip() == "Title"
    assert figure.axes[0].get_title(loc="left") == "a token: 10.0 ms, 20.0% of it waiting"
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["layer ", "0", "1"]


def test_panels_have_one_scale_and_the_legend_names_what_can_be_seen() -> None:
    figure = draw_lanes({"waits": WAITED, "all there": RESIDENT}, "Title", "conditions")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert [label.get_text() for label in second.get_yticklabels()] == ["computing", "waiting"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "experts", "all else", "waiting for experts", "fetched on demand", "fetched ahead of need",
    ]  # fmt: skip
    alone = draw_lanes({"all there": RESIDENT}, "Title", "conditions")
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["experts", "all else"]


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one pass"):
        draw_lanes({}, "Title", "conditions")
