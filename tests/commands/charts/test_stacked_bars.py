from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from promoe.commands.charts.stacked_bars import Columns, Rows, Series, stacked_columns, stacked_rows


def drawing(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL)[0])  # type: ignore[index]


def bars(figure: str, css: str) -> list[ElementTree.Element]:
    return [e for e in drawing(figure).iter("rect") if css in e.get("class", "").split()]


ONE_LAYER, LAYERS = Columns.of_layers(1), Columns.of_layers(2)


def write(value: float) -> str:
    return f"{value:.0f} ms"


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def test_rows_are_stacked_to_scale() -> None:
    figure = stacked_rows(
        "t",
        "s",
        Rows(["a", "b"], ["30", "60"]),
        [Series("compute", "compute", [10, 20]), Series("stall", "stall", [20, 40])],
        "time (ms)",
        write,
    )
    compute, stall = bars(figure, "compute"), bars(figure, "stall")
    assert number(stall[0], "width") == pytest.approx(2 * number(compute[0], "width"), abs=0.2)
    assert number(stall[1], "width") == pytest.approx(2 * number(stall[0], "width"), abs=0.2)
    for first, second in zip(compute, stall, strict=True):
        assert number(second, "x") == pytest.approx(number(first, "x") + number(first, "width"), abs=0.2)
    assert [e.findtext("title") for e in stall] == ["a\nstall: 20 ms", "b\nstall: 40 ms"]


def test_the_bound_stands_where_it_belongs_and_in_the_legend() -> None:
    rows = Rows(["a", "b"], ["30", "60"], marks=[15, None], mark_label="bound", intervals=[None, (50, 70)])
    figure = stacked_rows("t", "s", rows, [Series("compute", "compute", [30, 60])], "time (ms)", write)
    svg = drawing(figure)
    bounds = [e for e in svg.iter("line") if e.get("class") == "bound"]
    bar = bars(figure, "compute")[0]
    assert len(bounds) == 1
    middle = number(bar, "x") + number(bar, "width") / 2
    assert number(bounds[0], "x1") == pytest.approx(middle, abs=0.2)
    assert "95% interval: 50 ms to 70 ms" in figure
    assert figure.count("<li>") == 3


def test_columns_share_a_scale_through_top() -> None:
    alone = stacked_columns("t", "s", LAYERS, [Series("stall", "stall", [5.0, 10.0])], "stall (ms)", write)
    among = stacked_columns("t", "s", LAYERS, [Series("stall", "stall", [5.0, 10.0])], "stall (ms)", write, top=20)
    assert number(bars(alone, "stall")[1], "height") == pytest.approx(
        2 * number(bars(among, "stall")[1], "height"), abs=1
    )


def test_columns_stand_on_each_other() -> None:
    figure = stacked_columns(
        "t",
        "s",
        ONE_LAYER,
        [Series("hit", "hit", [60.0]), Series("stall", "waited", [40.0])],
        "needed (%)",
        write,
        top=100,
    )
    hit, waited = bars(figure, "hit")[0], bars(figure, "stall")[0]
    assert number(waited, "y") + number(waited, "height") == pytest.approx(number(hit, "y"), abs=0.2)
    assert waited.findtext("title") == "MoE layer 0\nwaited: 40 ms"


def test_only_what_can_be_seen_is_in_the_legend() -> None:
    series = [
        Series("hit", "seen", [1.0]),
        Series("pending", "not seen", [0.0]),
        Series("stall", "unknown", [math.nan]),
    ]
    for figure in (
        stacked_columns("t", "s", ONE_LAYER, series, "x (%)", write),
        stacked_rows("t", "s", Rows(["a"], ["1"]), series, "x (%)", write),
    ):
        assert "seen</li>" in figure
        figure = figure.partition("<details")[0]
        assert "not seen" not in figure
        assert "unknown" not in figure


def test_many_layers_keep_readable_labels() -> None:
    figure = stacked_columns(
        "t", "s", Columns.of_layers(94), [Series("stall", "stall", [1.0] * 94)], "stall (ms)", write
    )
    labels = [e for e in drawing(figure).iter("text") if e.get("class") == "tick mid"]
    positions = [number(e, "x") for e in labels]
    assert min(b - a for a, b in pairwise(positions)) > 20


def test_all_zero_is_said() -> None:
    assert "zero in every layer" in stacked_columns(
        "t", "s", ONE_LAYER, [Series("stall", "stall", [0.0])], "stall (ms)", write
    )


def test_columns_have_their_values_and_marks_where_asked() -> None:
    columns = Columns("ahead (k)", ["1", "2"], marks=[10.0, 20.0], mark_label="by chance", value_labels=True)
    figure = stacked_columns("t", "s", columns, [Series("predicting", "named", [80.0, 40.0])], "needed (%)", write)
    svg = drawing(figure)
    first, second = bars(figure, "predicting")
    assert number(first, "height") == pytest.approx(2 * number(second, "height"), abs=0.2)
    marks = [e for e in svg.iter("line") if e.get("class") == "bound"]
    assert [e.findtext("title") for e in marks] == ["by chance: 10 ms", "by chance: 20 ms"]
    assert number(marks[0], "y1") == pytest.approx(number(first, "y") + number(first, "height") * 7 / 8, abs=0.3)
    assert [e.text for e in svg.iter("text") if e.get("class") == "total mid"] == ["80 ms", "40 ms"]


def test_every_chart_is_a_table_too_and_says_what_it_shows() -> None:
    rows = Rows(["a", "b"], ["30", "60"], marks=[15, None], mark_label="bound", intervals=[None, (50, 70)])
    figure = stacked_rows("Time", "s", rows, [Series("compute", "compute", [30, math.nan])], "time (ms)", write)
    assert drawing(figure).get("aria-label") == "Time: a 30; b 60."
    assert re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", figure) == [
        *("run", "compute", "bound", "95% interval"),
        *("a", "30 ms", "15 ms", "–"),
        *("b", "–", "–", "50 ms to 70 ms"),
    ]
    figure = stacked_columns("Stall", "s", LAYERS, [Series("stall", "stall", [1, 2])], "stall (ms)", write, of="a run")
    assert drawing(figure).get("aria-label") == "Stall: stall 1 ms to 2 ms."
    assert re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", figure) == [
        "MoE layer (index)",
        "stall",
        "0",
        "1 ms",
        "1",
        "2 ms",
    ]
    assert '<span class="tag">a run</span>' in figure
