"""Reports as text: of one run, and of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from promoe.errors import ConfigError
from promoe.stats.run import Run
from promoe.stats.run_table import text_table
from promoe.stats.saved_run import load_run, save_run
from promoe.stats.text_columns import bullets
from promoe.stats.totals import Stats
from promoe.stats.words import advice, comparison, meaning

# Public names: programs import runs, and what makes and reads their files, from here.
__all__ = ["Run", "baseline_of", "load_run", "save_run", "text_comparison", "text_report"]


def text_report(
    stats: Stats, *, tpot_s: float | None = None, ttft_s: float | None = None, bound_s: float | None = None
) -> str:
    """Return the numbers, what they mean, and what to do (`model.promoe.report()`).

    Args:
        stats: what was counted.
        tpot_s: measured seconds per output token; None: the mean over decode passes.
        ttft_s: measured seconds to the first token; None: the mean over prefill passes.
        bound_s: least seconds per token that compute and link allow, if known.

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
    """Return a table of runs (one line each, units in the second line), and sentences about it.

    Args:
        runs: at least one, with different names.
        baseline: name of the run that others are compared with; None: the first whose experts do not all fit its cache.

    Raises:
        ConfigError: no runs, a name twice, or no run of that name.
    """
    base = baseline_of(runs, baseline)
    words = bullets(comparison(runs, base)) if len(runs) > 1 else []
    return "\n".join([text_table(runs, base), *([""] if words else []), *words])


def baseline_of(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run that others are compared with: that of a name, or the first whose experts do not all fit its cache.

    Raises:
        ConfigError: no runs, a name twice, or no run of that name.
    """
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
