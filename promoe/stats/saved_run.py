"""A run as a JSON file: everything that a report shows of it, so that runs can be compared later.

Such a file may come from somebody else: its content is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from promoe.errors import ConfigError, shown
from promoe.files import PathLike, read_json, write_atomically
from promoe.stats.lanes import Lanes, Transfer, Work
from promoe.stats.records import RecordError, from_plain, to_plain
from promoe.stats.run import Run
from promoe.stats.totals import Stats

FORMAT = "promoe run"
VERSION = 1


class SavedRun(NamedTuple):
    """A run, and the conditions that its numbers hold for."""

    run: Run
    conditions: dict[str, str]


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
    values = {"format": FORMAT, "version": VERSION, "conditions": dict(conditions or {}), **to_plain(run)}
    return write_atomically(path, [json.dumps(values, separators=(",", ":"), allow_nan=False), "\n"])


def load_run(path: PathLike) -> SavedRun:
    """Return the run and its conditions that `save_run` wrote.

    Raises:
        ConfigError: the file cannot be read, is not a saved run, or is damaged.
    """
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read '{path}': {why}. Give a file that `promoe run --report` wrote.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"'{path}' is not a saved run. Give the JSON file that `promoe run --report FILE.html` writes beside its page."
        )
    if values.get("version") != VERSION:
        raise ConfigError(
            f"'{path}' is a saved run of version {shown(values.get('version'))}, and this promoe reads version {VERSION}. "
            "Make it again with this one."
        )
    try:
        return _saved_run(values)
    except RecordError as error:
        raise ConfigError(f"'{path}' is damaged: {error}. Make it again with `promoe run --report`.") from error


def _saved_run(values: Mapping[str, Any]) -> SavedRun:
    kinds = get_type_hints(Run)
    # What is missing is None, which only optional fields may be.
    run = Run(**{f.name: from_plain(kinds[f.name], values.get(f.name), f.name) for f in fields(Run)})
    conditions = values.get("conditions")
    if not isinstance(conditions, dict):
        raise RecordError(f"conditions are {shown(conditions)}")
    _check_sizes(run.stats)
    if run.token is not None:
        _check_times(run.token)
    return SavedRun(run, {_condition(name): _condition(value) for name, value in conditions.items()})


def _condition(text: Any) -> str:
    return str(from_plain(str, text, "a condition"))


def _check_sizes(stats: Stats) -> None:
    """Raise RecordError unless all parts have as many entries as there are layers and experts."""
    num_experts = stats.num_experts
    for name, phase in (("prefill", stats.prefill), ("decode", stats.decode)):
        found = tuple(len(layer.expert_counts) for layer in phase.layers)
        if found != num_experts:
            raise RecordError(f"{name} counts experts {shown(found)}, and the layers have {shown(num_experts)}")
    if len(stats.expert_bytes) != len(num_experts):
        raise RecordError(f"{len(stats.expert_bytes)} sizes of experts for {len(num_experts)} layers")
    for stretch in stats.over_time:
        if len(stretch.expert_counts) != sum(num_experts) or not stretch.passes:
            raise RecordError(f"a stretch of {stretch.passes} passes counts {len(stretch.expert_counts)} experts")


def _check_times(token: Lanes) -> None:
    """Raise RecordError if something ends before it begins, or after the pass."""
    parts: list[Work | Transfer] = [*token.visits, *token.waits, *token.predictions, *token.transfers]
    for one in parts:
        if not 0 <= one.start_s <= one.end_s <= token.duration_s:
            raise RecordError(f"{one}, and the pass ends at {token.duration_s} s")
