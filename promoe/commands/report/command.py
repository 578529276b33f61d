"""`promoe report`: reads runs, writes the page, and prints what it says in text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from promoe.commands.charts.html_report import html_report
from promoe.commands.report.options import Options
from promoe.errors import ConfigError
from promoe.files import check_writable
from promoe.stats.run import Run
from promoe.stats.saved_run import SavedRun, load_run
from promoe.stats.text_columns import bullets
from promoe.stats.text_report import text_comparison, text_report

# Conditions under which runs have to be alike, or their times say little about their settings.
SAME = ("model", "prompt", "tokens", "threads", "processor", "versions")


def report(options: Options, out: TextIO | None = None) -> Path:
    """Read the runs, write the page, and print to `out` (None: stdout) what it says in text.

    Raises:
        ConfigError: a file is not a saved run, runs are of different models, or the page cannot be written.
    """
    check_writable(options.out)
    _check_not_read(options)
    found = {name: load_run(path) for name, path in _names(options.runs).items()}
    _check_same_model({name: saved.run for name, saved in found.items()})
    runs = [replace(saved.run, name=name) for name, saved in found.items()]
    title = f"promoe report: {' and '.join(found)}" if len(found) <= 2 else f"promoe report: {len(found)} runs"
    path = html_report(runs, options.out, title, _conditions(found), baseline=options.baseline)
    alone = runs[0]
    text = text_comparison(runs, baseline=options.baseline) if len(runs) > 1 else text_report(alone.stats)
    if differing := _differing(found):
        text = "\n".join(
            [text, *bullets([f"The runs are not of the same {' and '.join(differing)}: see the page's head."])]
        )
    print(text, "", f"report    {path}", sep="\n", file=out)
    return path


def _check_not_read(options: Options) -> None:
    for path in options.runs:
        if os.path.realpath(path) == os.path.realpath(options.out):
            raise ConfigError(f"--out names '{options.out}', which is one of the runs. Give another file.")


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Return the path of each run by name: the file's name without its ending where that tells them apart, else the path."""
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(paths)
    if len(set(names)) < len(names):
        raise ConfigError(f"Give each run once. Got {' '.join(paths)}.")
    return dict(zip(names, paths, strict=True))


def _check_same_model(runs: Mapping[str, Run]) -> None:
    (first, one), *others = runs.items()
    for name, run in others:
        if run.stats.num_experts != one.stats.num_experts:
            raise ConfigError(
                f"The runs are of different models: “{first}” has {_sizes(one)}, “{name}” {_sizes(run)}. "
                "Compare runs of one model."
            )


def _sizes(run: Run) -> str:
    layers = run.stats.num_experts
    return f"{len(layers)} MoE layers with {sum(layers):,} experts"


def _differing(found: Mapping[str, SavedRun]) -> list[str]:
    """Return what should be the same in runs that are compared, and is not."""
    return [key for key in SAME if len({saved.conditions.get(key) for saved in found.values()}) > 1]


def _conditions(found: Mapping[str, SavedRun]) -> dict[str, str]:
    """Return conditions that are the same for all runs once, and others with the names of the runs."""
    keys = dict.fromkeys(key for saved in found.values() for key in saved.conditions)
    result = {}
    for key in keys:
        values = {name: saved.conditions.get(key, "unknown") for name, saved in found.items()}
        same = len(set(values.values())) == 1
        result[key] = next(iter(values.values())) if same else "\n".join(f"{n}: {v}" for n, v in values.items())
    return result
