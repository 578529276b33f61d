"""A run as a JSON file: everything that a report shows of it, so that runs can be compared later.

Such a file may come from somebody else: what it says is checked before anything is made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from promoe.errors import ConfigError, shown
from promoe.files import PathLike, read_json
from promoe.stats.lanes import Lanes, Transfer, Work
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.units import is_number

FORMAT = "promoe run"
VERSION = 1
MOST = 2**62
"""Of any number: sums of some thousands are still numbers that floats and formats can hold."""
MOST_TEXT = 4000
# A terminal would obey them. Conditions may have lines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Saved(NamedTuple):
    """A run, and what its numbers hold for."""

    run: Run
    conditions: dict[str, str]


def pieces(run: Run, conditions: Mapping[str, str]) -> Iterator[str]:
    """The text of the file."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "name": run.name,
        "note": run.note,
        "conditions": dict(conditions),
        "tpot_s": _number(run.tpot_s),
        "tpot_interval_s": run.tpot_interval_s,
        "ttft_s": _number(run.ttft_s),
        "bound_s": _number(run.bound_s),
        "stats": run.stats.to_json(),
        "token": None if run.token is None else _plain(run.token),
    }
    yield json.dumps(values, separators=(",", ":"), allow_nan=False)
    yield "\n"


def read(path: PathLike) -> Saved:
    """The run in a file.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read '{path}': {why}. Give a file that `promoe run --report` wrote.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"'{path}' is no saved run. Give the JSON file that `promoe run --report FILE.html` writes beside its page."
        )
    if values.get("version") != VERSION:
        raise ConfigError(
            f"'{path}' is a saved run of version {shown(values.get('version'))}, and this promoe reads version {VERSION}. "
            "Make it again with this one."
        )
    try:
        return _saved(values)
    except _Unfit as error:
        raise ConfigError(f"'{path}' is damaged: {error}. Make it again with `promoe run --report`.") from error


class _Unfit(Exception):
    """Something in a file is not what it has to be."""


def _saved(values: Mapping[str, Any]) -> Saved:
    hints = get_type_hints(Run)
    own = {
        field.name: _typed(hints[field.name], values.get(field.name), field.name)
        for field in fields(Run)
        if field.name not in ("name", "note")
    }
    texts = {name: _typed(str, values.get(name), name) for name in ("name", "note")}
    conditions = values.get("conditions")
    if not isinstance(conditions, dict):
        raise _Unfit(f"conditions are {shown(conditions)}")
    run = Run(**texts, **own)
    _check_sizes(run.stats)
    if run.token is not None:
        _check_times(run.token)
    return Saved(run, {_typed(str, k, "a condition"): _typed(str, v, "a condition") for k, v in conditions.items()})


def _check_sizes(stats: Stats) -> None:
    """Raise if parts that have one entry per layer or expert have another number of them."""
    num_experts = stats.num_experts
    for name, phase in (("prefill", stats.prefill), ("decode", stats.decode)):
        found = tuple(len(layer.expert_counts) for layer in phase.layers)
        if found != num_experts:
            raise _Unfit(f"{name} counts experts {shown(found)}, and the layers have {shown(num_experts)}")
    if len(stats.expert_bytes) != len(num_experts):
        raise _Unfit(f"{len(stats.expert_bytes)} sizes of experts for {len(num_experts)} layers")
    for stretch in stats.over_time:
        if len(stretch.expert_counts) != sum(num_experts) or not stretch.passes:
            raise _Unfit(f"a stretch of {stretch.passes} passes counts {len(stretch.expert_counts)} experts")


def _check_times(token: Lanes) -> None:
    """Raise if something ends before it begins, or outlasts the pass."""
    parts: list[Work | Transfer] = [*token.visits, *token.waits, *token.predictions, *token.transfers]
    for one in parts:
        if not 0 <= one.start_s <= one.end_s <= token.duration_s:
            raise _Unfit(f"{one}, and the pass ends at {token.duration_s} s")


def _number(value: float | None) -> float | None:
    return value if is_number(value) else None


def _plain(value: Any) -> Any:
    """Records as dicts, tuples of them as lists."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` says, records made of dicts; what is derived in them is left out.

    Raises:
        _Unfit: it is something else.
    """
    if get_origin(hint) in (Union, UnionType):
        (other,) = (kind for kind in get_args(hint) if kind is not NoneType)
        return None if value is None else _typed(other, value, where)
    if hint in (int, float, str):
        return _plain_value(hint, value, where)
    if get_args(hint):
        return _sequence(get_args(hint), value, where)
    if not isinstance(value, dict):
        raise _Unfit(f"{where} is {shown(value)}")
    hints = get_type_hints(hint)
    missing = [name for name in hints if name not in value and name in _required(hint)]
    if missing:
        raise _Unfit(f"{where} has no {missing[0]!r}")
    return hint(**{name: _typed(kind, value[name], f"{where}.{name}") for name, kind in hints.items() if name in value})


def _required(record: Any) -> set[str]:
    if is_dataclass(record):
        return {field.name for field in fields(record) if field.init}
    return set(record._fields)


def _plain_value(kind: type, value: Any, where: str) -> Any:
    if kind is str:
        if isinstance(value, str) and len(value) <= MOST_TEXT and not _CONTROLS.search(value):
            return value
    elif isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool):
        if not 0 <= value <= MOST:  # nan neither
            raise _Unfit(f"{where} is {shown(value)}")
        return kind(value)
    raise _Unfit(f"{where} is {shown(value)}")


def _sequence(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _Unfit(f"{where} is {shown(value)}")
    if len(kinds) == 1 or kinds[-1] is Ellipsis:
        return tuple(_typed(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(kinds):
        raise _Unfit(f"{where} has {len(value)} values")
    return tuple(_typed(kind, item, where) for kind, item in zip(kinds, value, strict=True))
