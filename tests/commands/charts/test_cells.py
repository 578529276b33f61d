from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from promoe.commands.charts.cells import Axis, cell_map, numbered, shade_scale
from promoe.commands.charts.style import LEVELS


def test_each_cell_is_in_the_path_of_its_shade() -> None:
    html = cell_map(
        [[0, 8, 0], [3]], numbered("row", 2, 8), numbered("column", 3, 8), 20, "spoken", row_tips=["a", "b<"]
    )
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", html)[0])  # type: ignore[index]
    assert {e.get("class"): e.get("d") for e in svg.iter("path")} == {
        "h0": "M0 0.5h.9M2 0.5h.9",
        "h3": "M0 1.5h.9",
        "h8": "M1 0.5h.9",
    }
    assert (svg.get("viewBox"), svg.get("preserveAspectRatio"), svg.get("aria-label")) == ("0 0 3 2", "none", "spoken")
    assert [e.findtext("title") for e in svg.iter("rect")] == ["a", "b<"]


def test_names_stand_in_the_middle_of_their_cells() -> None:
    html = cell_map([[0, 0]], Axis("y", 1, [(0, "only")]), Axis("x", 2, [(0, "a"), (1, "b")]), 10, "spoken")
    assert '<span style="top:50.00%">only</span>' in html
    assert '<span style="left:25.00%">a</span><span style="left:75.00%">b</span>' in html


@pytest.mark.parametrize(("size", "names"), [(3, ["0", "1", "2"]), (12, ["0", "4", "8"]), (0, [])])
def test_no_more_numbers_are_written_than_asked(size: int, names: list[str]) -> None:
    assert [name for _, name in numbered("x", size, 4).ticks] == names


def test_nothing_at_all_is_still_a_drawing() -> None:
    assert 'viewBox="0 0 1 1"' in cell_map([], numbered("y", 0, 8), numbered("x", 0, 8), 0, "nothing")


def test_the_scale_has_every_shade() -> None:
    scale = shade_scale("0%", "most")
    assert [scale.count(f'"h{shade}"') for shade in range(LEVELS)] == [1] * LEVELS
