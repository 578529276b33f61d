"""The report on runs as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from promoe.commands.charts.page import page
from promoe.files import PathLike, write_atomically
from promoe.stats.run import Run
from promoe.stats.text_report import baseline_of


def html_report(
    runs: Sequence[Run],
    path: PathLike,
    title: str = "promoe report",
    conditions: Mapping[str, str] | None = None,
    *,
    baseline: str | None = None,
) -> Path:
    """Write a report on `runs` as one HTML file: tables, charts per run, layer and token, heat maps, words, advice.

    Two runs are set side by side; of more, one is shown at a time. It needs no network and no other file, follows the
    reader's light or dark mode, and prints.

    Args:
        runs: one or more, with different names; for comparisons all of the same model.
        path: where to write; replaced if it exists.
        title: heading of the page.
        conditions: what the numbers hold for (model, link, prompts, threads, ...), shown at the top.
        baseline: name of the run that others are compared with; None: the first whose experts do not all fit its cache.

    Returns:
        The path written.

    Raises:
        ConfigError: no runs, a name twice, no run of that name, or the file cannot be written
            (call `promoe.files.check_writable(path)` before a long measurement).
    """
    return write_atomically(path, page(runs, baseline_of(runs, baseline), title, conditions or {}))
