from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from promoe.commands.charts.svg import Canvas, coord, every, tick_labels, ticks, wrapped


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (116.0, ["0", "25", "50", "75", "100", "125"]),
        (0.037, ["0", "0.01", "0.02", "0.03", "0.04"]),
        (2500.0, ["0", "500", "1000", "1500", "2000", "2500"]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top: float, expected: list[str]) -> None:
    values = ticks(top)
    assert values[-1] >= top * (1 - 1e-9)
    assert tick_labels(values) == expected


@pytest.mark.parametrize("top", [0.0, -1.0, float("nan"), float("inf")])
def test_ticks_without_anything_to_show_still_make_an_axis(top: float) -> None:
    assert ticks(top) == [0.0, 1.0]


@pytest.mark.parametrize("exponent", range(-9, 10))
def test_ticks_at_every_scale(exponent: int) -> None:
    for digit in range(1, 10):
        top = digit * 10.0**exponent
        values = ticks(top)
        assert 3 <= len(values) <= 7
        assert values[-1] >= top * (1 - 1e-9)
        assert values[-2] < top


def test_labels_are_left_out_by_powers_of_two() -> None:
    assert [every(x) for x in (0.2, 1.0, 1.1, 2.0, 2.5, 9.0)] == [1, 1, 2, 2, 4, 16]


def test_names_are_wrapped_and_cut() -> None:
    assert wrapped("on-demand LRU", 25) == ["on-demand LRU"]
    assert wrapped("a name that is too long for one line", 20) == ["a name that is too", "long for one line"]
    assert wrapped("one two three four", 5) == ["one", "two…"]
    assert wrapped("x" * 30, 10) == ["x" * 9 + "…"]
    assert wrapped("", 10) == [""]


def test_marks_are_escaped_xml_with_hover_titles() -> None:
    canvas = Canvas(10, 20)
    canvas.rect(0, 0, -1, 5, "a", 'tip "1" <b>')
    canvas.text(1, 2, "<t> & u", "b", rotate=True, tip="more")
    canvas.line(0, 0, 1, 1, "c")
    canvas.circle(1, 1, 2, "d", "dot")
    canvas.path("M0 0", "e")
    svg = ElementTree.fromstring(canvas.render('label "x"'))
    assert svg.get("aria-label") == 'label "x"'
    assert [child.tag for child in svg] == ["rect", "text", "line", "circle", "path"]
    assert svg[0].get("width") == "0", "a negative width is not drawn"
    assert svg[0][0].text == 'tip "1" <b>'
    assert svg[1].text == "<t> & u"


def test_coordinates_are_short() -> None:
    assert (coord(3.0), coord(3.14159), coord(0.04)) == ("3", "3.1", "0")
