from __future__ import annotations

import re

import pytest
from matplotlib import colors

from promoe.commands.charts.style import CSS
from promoe.errors import ConfigError
from promoe.stats import figure_style as figures
from promoe.stats.figure_style import COLOURS, HATCHED, MARKERS, MEANING, new_figure, percent_axis, plain, set_title


def test_a_colour_means_the_same_as_in_the_html_report() -> None:
    light = dict(re.findall(r"--(\w+):(#\w+);", CSS.partition("@media")[0]))
    shared = {name: colour for name, colour in MEANING.items() if name in light}
    assert shared == {name: light[name] for name in shared}
    assert shared == MEANING
    assert MEANING["rest"] == light["h2"]  # computing, paler
    hatched = re.findall(r"svg \.(\w+)\{fill:url\(", CSS)
    assert set(HATCHED) == set(hatched)


def test_every_colour_has_a_marker_of_its_own() -> None:
    assert len(set(COLOURS)) == len(set(MARKERS)) == len(COLOURS)
    assert all(colors.is_color_like(colour) for colour in (*COLOURS, *MEANING.values()))


def test_axes_come_row_by_row_with_their_heights() -> None:
    figure, grid = new_figure(2, 1, (4.0, 3.0), heights=[3, 1])
    assert list(figure.get_size_inches()) == [4.0, 3.0]
    assert grid[0].get_gridspec().get_height_ratios() == [3, 1]


def test_only_the_axis_at_the_bottom_is_drawn() -> None:
    _, (axes,) = new_figure(1, 1, (4.0, 3.0))
    plain(axes)
    assert [name for name, spine in axes.spines.items() if spine.get_visible()] == ["bottom"]
    percent_axis(axes, "share, %")
    assert axes.get_ylim() == (0, 102)
    assert axes.get_ylabel() == "share, %"


def test_a_title_has_a_line_for_conditions() -> None:
    figure, _ = new_figure(1, 1, (4.0, 3.0))
    set_title(figure, "What", "how")
    assert figure.get_suptitle() == "What\n"
    assert [text.get_text() for text in figure.texts if text.get_text() != "What\n"] == ["how"]


def test_matplotlib_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'promoe\[viz\]'"):
        new_figure(1, 1, (4.0, 3.0))
