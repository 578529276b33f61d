"""Records become plain values and come back; errors name the value that does not fit its type."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.stats.records import MAX_NUMBER, MAX_TEXT, RecordError, combined, from_plain, to_plain


class Point(NamedTuple):
    x: int
    note: str | None = None


@dataclass(frozen=True)
class Part:
    number: int
    seconds: float


@dataclass(frozen=True)
class Whole:
    _derived: ClassVar[tuple[str, ...]] = ("total",)
    name: str
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    points: Sequence[Point]
    interval: tuple[float, float] | None = None

    @property
    def total(self) -> int:
        return sum(self.counts)


def whole(**changes: Any) -> Whole:
    values: dict[str, Any] = {"counts": (1, 2), "parts": (Part(1, 0.5),), "points": (Point(3), Point(4, "far"))}
    return Whole("a", **values | changes)


@given(
    st.builds(
        whole,
        counts=st.lists(st.integers(0, MAX_NUMBER)).map(tuple),
        parts=st.lists(st.builds(Part, st.integers(0, 9), st.floats(0, 1e9))).map(tuple),
        interval=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
    )
)
def test_what_becomes_json_comes_back(record: Whole) -> None:
    assert from_plain(Whole, json.loads(json.dumps(to_plain(record), allow_nan=False)), "whole") == record


def test_records_are_dicts_nan_is_none_and_derived_values_stand_beside_the_fields() -> None:
    plain = to_plain(whole(parts=(Part(1, math.nan),)))
    assert plain["parts"] == [{"number": 1, "seconds": None}]
    assert plain["points"] == [{"x": 3, "note": None}, {"x": 4, "note": "far"}]
    assert plain["total"] == 3
    assert from_plain(Whole, plain | {"parts": [], "derived": 1}, "whole") == whole(parts=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "whole.name is 1"),
        ({"name": "\x1b[2J"}, r"whole.name is '\\x1b"),
        ({"name": "x" * (MAX_TEXT + 1)}, "whole.name is 'xxx"),
        ({"counts": [1, -1]}, r"whole.counts\[1\] is -1"),
        ({"counts": [True]}, r"whole.counts\[0\] is True"),
        ({"counts": [1.5]}, r"whole.counts\[0\] is 1.5"),
        ({"counts": [MAX_NUMBER + 1]}, r"whole.counts\[0\] is 46"),
        ({"counts": {}}, "whole.counts is {}"),
        ({"parts": [{"number": 1, "seconds": math.nan}]}, r"whole.parts\[0\].seconds is nan"),
        ({"parts": [{"number": 1}]}, r"whole.parts\[0\] has no 'seconds'"),
        ({"parts": [[1, 2.0]]}, r"whole.parts\[0\] is \[1, 2.0\]"),
        ({"interval": [1.0]}, "whole.interval has 1 values"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_plain(Whole, to_plain(whole()) | change, "whole")


def test_records_are_combined_number_by_number() -> None:
    a, b = Part(3, 1.5), Part(1, 0.5)
    assert combined(add, a, b) == Part(4, 2.0)
    assert combined(sub, a, b) == Part(2, 1.0)

    @dataclass(frozen=True)
    class Nested:
        parts: tuple[Part, ...]
        counts: tuple[int, ...]

    assert combined(add, Nested((a, b), (1, 2)), Nested((b, b), (3, 4))) == Nested((Part(4, 2.0), Part(2, 1.0)), (4, 6))
    with pytest.raises(ValueError, match="longer"):
        combined(add, Nested((), (1,)), Nested((), (1, 2)))
