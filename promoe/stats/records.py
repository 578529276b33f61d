"""Records (dataclasses and named tuples): as plain values for JSON and back, with checks, and added up.

JSON may come from somebody else, so records are only made of values that are what their types say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import starmap
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from promoe.errors import shown

MAX_NUMBER = 2**62
"""The largest number allowed: sums of thousands of them are still numbers that floats and formats can represent."""
MAX_TEXT = 4000
# Control characters, which a terminal would obey. New lines and tabs are allowed.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


_T = TypeVar("_T")
_hints = cache(get_type_hints)


class RecordError(ValueError):
    """A value is not what the type of its record says."""


def combined(operation: Callable[[Any, Any], Any], a: _T, b: _T) -> _T:
    """Return two equal dataclasses as one, number by number, for example added by `operator.add`."""
    result: Any
    if isinstance(a, tuple) and isinstance(b, tuple):
        pairs = zip(a, b, strict=True)
        # Of the 100,000 counts that there may be, each must not take a call of this function.
        nested = bool(a) and is_dataclass(a[0])
        result = tuple(combined(operation, x, y) for x, y in pairs) if nested else tuple(starmap(operation, pairs))
    elif is_dataclass(a) and not isinstance(a, type):
        values = {f.name: combined(operation, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)}
        result = type(a)(**values)
    else:
        result = operation(a, b)
    return result  # type: ignore[no-any-return]


def to_plain(value: Any) -> Any:
    """Return records as dicts, tuples as lists, and NaN as None.

    Properties that a record's class names in `_derived` stand beside its fields.

    Args:
        value: a record, a sequence of records or of numbers, a number, a text or None.
    """
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if (names := _names(value.__class__)) is not None:
        return {name: to_plain(getattr(value, name)) for name in (*names, *getattr(value, "_derived", ()))}
    # The items of a sequence have one type; a sequence of numbers may have 100,000.
    return [to_plain(item) for item in value] if value and _names(value[0].__class__) is not None else list(value)


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as the type `kind` says, with dicts as records. Names that a record does not have are left out.

    Args:
        kind: a record, `int`, `float`, `str`, `tuple[...]`, `Sequence[...]`, or an optional one of these.
        value: as `json.load` returns it.
        where: what it is, for error messages.

    Raises:
        RecordError: it is something else, a number is negative, or a text is too long or has control characters.
    """
    if get_origin(kind) in (Union, UnionType):
        (other,) = (one for one in get_args(kind) if one is not NoneType)
        return None if value is None else from_plain(other, value, where)
    if kind in (int, float, str):
        return _scalar(kind, value, where)
    if get_args(kind):
        return _sequence(get_args(kind), value, where)
    if not isinstance(value, dict):
        raise RecordError(f"{where} is {shown(value)}")
    hints = _hints(kind)
    names = _names(kind) or ()
    required = {field.name for field in fields(kind) if field.init} if is_dataclass(kind) else set(names)
    missing = [name for name in names if name not in value and name in required]
    if missing:
        raise RecordError(f"{where} has no {missing[0]!r}")
    found = [name for name in names if name in value]
    return kind(**{name: from_plain(hints[name], value[name], f"{where}.{name}") for name in found})


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of records of that class; None if it is not a record's."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return names


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is str:
        if isinstance(value, str) and len(value) <= MAX_TEXT and not _CONTROLS.search(value):
            return value
    elif isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool):
        if not 0 <= value <= MAX_NUMBER:  # neither is NaN
            raise RecordError(f"{where} is {shown(value)}")
        return kind(value)
    raise RecordError(f"{where} is {shown(value)}")


def _sequence(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise RecordError(f"{where} is {shown(value)}")
    if len(kinds) == 1 or kinds[-1] is Ellipsis:
        if kinds[0] is int and set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= MAX_NUMBER:
            return tuple(value)  # 100,000 counts at once
        return tuple(from_plain(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(kinds):
        raise RecordError(f"{where} has {len(value)} values")
    return tuple(from_plain(kind, item, where) for kind, item in zip(kinds, value, strict=True))
