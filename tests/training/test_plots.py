"""Plots: what is drawn, for whom, and that nobody else's settings change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from promoe.errors import ConfigError
from promoe.stats import figure_style as style
from promoe.stats.figure_style import COLOURS
from promoe.training.plots import check_plots, draw_accuracy, draw_calibration, draw_layers, save_plots

from .results import calibration, figures

matplotlib = pytest.importorskip("matplotlib")

RESULT: dict[str, Any] = {
    "gate": {"1": figures(0.8, calibration=calibration(0.05)), "4": figures(0.5, calibration=calibration(0.1))},
    "token": {"1": figures(0.6), "4": figures(0.6)},
    "mlp": {"1": figures(None), "4": figures(0.7)},
}
PNG = b"\x89PNG\r\n\x1a\n"


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_three_files_are_written_and_nothing_global_changes(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    written = save_plots(RESULT, tmp_path, "trace")
    assert [path.name for path in written] == ["accuracy.png", "accuracy_by_layer.png", "calibration.png"]
    assert all(path.read_bytes().startswith(PNG) for path in written)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_what_there_is_nothing_of_is_not_drawn(tmp_path: Path) -> None:
    assert [path.name for path in save_plots({"token": RESULT["token"]}, tmp_path, "trace")] == [
        "accuracy.png",
        "accuracy_by_layer.png",
    ]
    nothing = {"mlp": {"1": figures(None)}}
    assert save_plots(nothing, tmp_path, "trace") == []


def test_accuracy_has_a_line_per_kind_best_first_in_the_legend() -> None:
    figure = draw_accuracy(RESULT, "trace")
    assert figure is not None
    (axes,) = figure.axes
    assert lines_of(axes) == {"gate": ([1, 4], [80, 50]), "token": ([1, 4], [60, 60]), "mlp": ([4], [70])}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mlp", "token", "gate"]
    assert axes.get_ylabel().endswith("%")
    assert "layers" in axes.get_xlabel()
    dashed = {line.get_label(): line.get_linestyle() == "--" for line in axes.get_lines()}
    assert dashed == {"gate": False, "token": True, "mlp": False}


def test_layers_have_a_panel_per_lookahead_and_gaps_where_nothing_is_predicted() -> None:
    figure = draw_layers(RESULT, "trace")
    assert figure is not None
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["k = 1", "k = 4"]
    assert set(lines_of(first)) == {"gate", "token"}
    assert lines_of(second)["mlp"] == ([1, 2], [70, 70])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gate", "token", "mlp"]


def test_calibration_has_a_diagonal_and_brier_scores() -> None:
    figure = draw_calibration(RESULT, "trace")
    assert figure is not None
    lines = lines_of(figure.axes[0])
    assert lines["gate, Brier 0.050"] == ([5, 90], [10, 80])
    assert ([0, 100], [0, 100]) in lines.values()


def test_three_lookaheads_leave_no_empty_panel() -> None:
    figure = draw_layers({"a": {k: figures(0.5) for k in ("1", "2", "4")}}, "trace")
    assert figure is not None
    assert len(figure.axes) == 3


def test_kinds_keep_their_colour_and_many_are_told_apart() -> None:
    result = {f"kind{i}": {"1": figures(i / 20)} for i in range(2 * len(COLOURS))}
    figure = draw_accuracy(result, "trace")
    assert figure is not None
    looks = {(line.get_color(), line.get_markerfacecolor()) for line in figure.axes[0].get_lines()}
    assert len(looks) == len(result)


def test_matplotlib_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'promoe\[viz\]'"):
        check_plots(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    check_plots(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Cannot make the folder"):
        check_plots(tmp_path / "file")
    (tmp_path / "accuracy.png").mkdir()
    with pytest.raises(ConfigError, match=r"Cannot write .*accuracy\.png"):
        save_plots(RESULT, tmp_path, "trace")
