from __future__ import annotations

from pathlib import Path

from commands.bench.reports import READ, report, table
from promoe.commands.bench import plots
from promoe.commands.bench.plots import save_plots


def test_a_picture_per_task(tmp_path: Path) -> None:
    tables = [table(cache, task) for cache in ("12.5%", "25%") for task in ("generate", READ)]
    written = save_plots(report(*tables), tmp_path)
    assert [path.name for path in written] == ["generate.png", "prompts-of-64-tokens.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_what_is_drawn() -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    plots._draw_panel(axis, [table("12.5%"), table("25%")], plots._GENERATE[0])
    lines = {str(line.get_label()): line for line in axis.get_lines() if not str(line.get_label()).startswith("_")}
    assert list(lines) == ["resident", "on-demand", "gate", "page-cache"]
    assert list(lines["gate"].get_ydata()) == [110.0, 110.0]
    bounds = [line for line in axis.get_lines() if line.get_marker() == "_"]
    assert [list(line.get_ydata()) for line in bounds] == [[100.0, 100.0]] * 2
    assert axis.get_yscale() == "log"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["12.5%", "25%"]
