from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace

from synthetic_runs import make_token

from promoe.commands.charts.strip import UNITS, strip
from promoe.stats.lanes import Lanes, Transfer


def lanes(figure: str) -> dict[str, ElementTree.Element]:
    found = re.findall(r'<div class="lane"><b>([^<]*)</b>(<svg.*?</svg>)', figure, re.DOTALL)
    return {name: ElementTree.fromstring(svg) for name, svg in found}


def bars(lane: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    return [
        (float(e.get("x", "nan")), float(e.get("width", "nan"))) for e in lane.iter("rect") if e.get("class") == css
    ]


def test_each_lane_has_its_bars_where_they_belong() -> None:
    found = lanes(strip(make_token(layers=4, layer_s=5e-3)))
    assert list(found) == ["computing", "waiting", "link, reader 1", "link, reader 2", "predictor"]
    layer = UNITS / 4
    assert bars(found["computing"], "rest") == [(0, UNITS)]
    assert bars(found["computing"], "compute") == [((i + 0.5) * layer, layer / 2) for i in range(4)]
    assert bars(found["waiting"], "waited") == bars(found["computing"], "gap")
    assert bars(found["waiting"], "waited") == [((i + 0.5) * layer, layer / 4) for i in (1, 3)]
    assert bars(found["link, reader 1"], "demand") == bars(found["waiting"], "waited")
    assert len(bars(found["predictor"], "predict")) == 4


def test_chunks_of_one_expert_are_one_bar() -> None:
    lane = lanes(strip(make_token()))["link, reader 2"]
    assert bars(lane, "arrived") == [(UNITS / 8, UNITS / 16), (UNITS / 8 + UNITS / 2, UNITS / 16)]
    assert [e.text for e in lane.iter("title")] == [
        "layer 1, expert 5: prefetch, 2 chunks\n1.25 ms",
        "layer 3, expert 5: prefetch, 2 chunks\n1.25 ms",
    ]


def test_two_runs_share_a_time_axis() -> None:
    half = lanes(strip(make_token(), longest_s=0.04))["computing"]
    assert bars(half, "rest") == [(0, UNITS / 2)]


def test_it_says_in_words_and_numbers_what_it_shows() -> None:
    figure = strip(make_token(), of="a run")
    assert "The decode pass that took the median time, 20.0 ms: 7.50 ms experts, 12.5% waiting." in figure
    spoken = [e.get("aria-label") for e in lanes(figure).values()]
    assert spoken[:3] == [
        "computing: experts 7.50 ms, all else 10.0 ms.",
        "waiting: 2 times, 2.50 ms.",
        "link, reader 1: 2 experts or parts of them.",
    ]
    cells = re.findall(r"<td>([^<]*)</td>", figure)
    assert cells[4:8] == ["1.25 ms", "1.25 ms", "1", "1"]
    assert figure.count("<li>") == 6


def test_many_layers_are_numbered_sparingly() -> None:
    figure = strip(make_token(layers=94))
    labels = re.findall(r'<div class="layers"><b>layer</b><div>(.*?)</div>', figure)[0]
    assert re.findall(r">(\d+)<", labels) == [str(i) for i in range(0, 94, 4)]


def test_a_pass_without_anything_is_drawn_without_fault() -> None:
    empty = Lanes("decode", 1, 0.0, [], [], [], [])
    assert list(lanes(strip(empty))) == ["computing", "waiting"]


def test_transfers_are_gone_through_as_often_for_many_layers_as_for_few() -> None:
    class Counted(list[Transfer]):
        times = 0

        def __iter__(self) -> Iterator[Transfer]:
            self.times += 1
            return super().__iter__()

    def times(layers: int) -> int:
        token = make_token(layers)
        transfers = Counted(token.transfers)
        strip(replace(token, transfers=transfers))
        return transfers.times

    assert times(40) == times(4) > 0
