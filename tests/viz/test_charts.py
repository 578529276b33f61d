from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from promoe.viz.charts import Rows, Series, stacked_columns, stacked_rows


def drawing(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL)[0])  # type: ignore[index]


def bars(figure: str, css: str) -> list[ElementTree.Element]:
    return [e for e in drawing(figure).iter("rect") if css in e.get("class", "").split()]


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
    alone = stacked_columns("t", "s", [Series("stall", "stall", [5.0, 10.0])], "stall (ms)", write)
    among = stacked_columns("t", "s", [Series("stall", "stall", [5.0, 10.0])], "stall (ms)", write, top=20)
    assert number(bars(alone, "stall")[1], "height") == pytest.approx(
        2 * number(bars(among, "stall")[1], "height"), abs=1
    )


def test_columns_stand_on_each_other() -> None:
    figure = stacked_columns(
        "t", "s", [Series("hit", "hit", [60.0]), Series("stall", "waited", [40.0])], "needed (%)", write, top=100
    )
    hit, waited = bars(figure, "hit")[0], bars(figure, "stall")[0]
    assert number(waited, "y") + number(waited, "height") == pytest.approx(number(hit, "y"), abs=0.2)
    assert waited.findtext("title") == "layer 0\nwaited: 40 ms"


def test_only_what_can_be_seen_is_in_the_legend() -> None:
    series = [
        Series("hit", "seen", [1.0]),
        Series("pending", "not seen", [0.0]),
        Series("stall", "unknown", [math.nan]),
    ]
    for figure in (
        stacked_columns("t", "s", series, "x (%)", write),
        stacked_rows("t", "s", Rows(["a"], ["1"]), series, "x (%)", write),
    ):
        assert "seen</li>" in figure
        assert "not seen" not in figure
        assert "unknown" not in figure


def test_many_layers_keep_readable_labels() -> None:
    figure = stacked_columns("t", "s", [Series("stall", "stall", [1.0] * 94)], "stall (ms)", write)
    labels = [e for e in drawing(figure).iter("text") if e.get("class") == "tick mid"]
    positions = [number(e, "x") for e in labels]
    assert min(b - a for a, b in pairwise(positions)) > 20


def test_all_zero_is_said() -> None:
    assert "zero in every layer" in stacked_columns("t", "s", [Series("stall", "stall", [0.0])], "stall (ms)", write)
