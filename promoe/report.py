"""Reports on what happened: as text, and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from promoe.columns import bullets
from promoe.errors import ConfigError
from promoe.output import PathLike, write_atomically
from promoe.stats import Stats
from promoe.viz import saved
from promoe.viz.page import page
from promoe.viz.run import Run
from promoe.viz.saved import Saved
from promoe.viz.table import text_table
from promoe.viz.words import advice, comparison, meaning

__all__ = ["Run", "Saved", "html_report", "load_run", "save_run", "text_comparison", "text_report"]


def text_report(
    stats: Stats, *, tpot_s: float | None = None, ttft_s: float | None = None, bound_s: float | None = None
) -> str:
    """The numbers, what they mean, and what to do (`model.promoe.report()`).

    Args:
        stats: what was counted.
        tpot_s: measured seconds per output token; None: the mean over decode passes.
        ttft_s: measured seconds to the first token; None: the mean over prefill passes.
        bound_s: least seconds per token that compute and link allow, where it is known.

    Returns:
        Text of about 30 lines, its sentences wrapped to the terminal (60 to 100 characters; 100 without one). Each
        advice ends with the rule that led to it.
    """
    run = Run("this run", stats, tpot_s=tpot_s, ttft_s=ttft_s, bound_s=bound_s)
    parts = [stats.summary(), "", "What it means", *bullets(meaning(run))]
    found = advice(run)
    if found:
        parts += ["", "What to do", *bullets([f"{a.text} (rule: {a.rule})" for a in found])]
    return "\n".join(parts)


def text_comparison(runs: Sequence[Run], *, baseline: str | None = None) -> str:
    """A table of runs (one line each, units in the second line), and what it shows in words.

    Args:
        runs: at least one, with different names.
        baseline: name of the run that others are compared with; None: the first whose experts do not all fit its cache.

    Raises:
        ConfigError: no runs, a name twice, or no run of that name.
    """
    base = _baseline(runs, baseline)
    words = bullets(comparison(runs, base)) if len(runs) > 1 else []
    return "\n".join([text_table(runs, base), *([""] if words else []), *words])


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
            (call `promoe.output.check_writable(path)` before a long measurement).
    """
    return write_atomically(path, page(runs, _baseline(runs, baseline), title, conditions or {}))


def save_run(run: Run, path: PathLike, conditions: Mapping[str, str] | None = None) -> Path:
    """Write all that a report shows of `run` as JSON, for `load_run` and `promoe report`.

    Args:
        run: what was measured.
        path: where to write; replaced if it exists.
        conditions: what the numbers hold for.

    Returns:
        The path written.

    Raises:
        ConfigError: the file cannot be written.
    """
    return write_atomically(path, saved.pieces(run, conditions or {}))


def load_run(path: PathLike) -> Saved:
    """The run, and its conditions, that `save_run` wrote.

    Raises:
        ConfigError: the file cannot be read, is no saved run, or is damaged.
    """
    return saved.read(path)


def _baseline(runs: Sequence[Run], name: str | None) -> Run:
    if not runs:
        raise ConfigError("A report needs at least one run. Got none.")
    by_name = {run.name: run for run in runs}
    if len(by_name) < len(runs):
        raise ConfigError(f"Runs of a report need different names. Got {[run.name for run in runs]}.")
    if name is not None and name not in by_name:
        raise ConfigError(
            f"The 'baseline' parameter must be one of the runs' names {list(by_name)}. Got {name!r} instead."
        )
    if name is not None:
        return by_name[name]
    return next((run for run in runs if run.stats.cache_rate < 1), runs[0])
