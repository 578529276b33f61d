"""Strategies that damage what is whole: JSON at any of its paths, and bytes anywhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000
MANY_DIGITS = 10_000

INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
)
FLOATS = (0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e19, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "0", "1", "-1", "3", "1.5", "nan", "none", "None", "F32", "BF16", "F4", "I64", "U8", "residual", "../x",
    "/etc/passwd", "a\0b", "\ud800",
    "\udcff.json", "ä", "é" * 300, "x" * 5000, "\n", "{{ 7 * 7 }}", "{% for x in y %}", "__class__", "²", "١",
    "9" * 5000, "true",
)  # fmt: skip

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.integers(-3, 70),
    st.sampled_from(FLOATS),
    st.sampled_from(TEXTS),
    st.text(max_size=6),
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=4),
    st.dictionaries(st.text(max_size=4) | st.sampled_from(TEXTS), LEAVES, max_size=3),
)
Path = tuple[Any, ...]


def paths(tree: Any, most: int = 400) -> list[Path]:
    """Where the values of a JSON tree are, the root's `()` first; of large trees the first and last."""
    found = list(_paths(tree, ()))
    return found if len(found) <= most else [*found[: most // 2], *found[-most // 2 :]]


def _paths(tree: Any, path: Path) -> Iterator[Path]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _paths(value, (*path, key))


def value_at(tree: Any, path: Path) -> Any:
    """What lies there."""
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def mutated(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any] = VALUES, most: int = 3) -> Any:
    """A copy of a JSON tree with one to `most` changes: values replaced, dropped, repeated, moved, renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        where = draw(st.sampled_from(paths(tree)))
        if not where:
            if draw(st.integers(0, 20)) == 0:
                return draw(values)
            continue
        owner, key = value_at(tree, where[:-1]), where[-1]
        change = draw(st.sampled_from(("replace", "replace", "nudge", "drop", "copy", "rename", "wrap", "add")))
        value = owner[key]
        if change == "nudge" and type(value) is int:
            owner[key] = value + draw(st.integers(-9, 9))
        elif change == "drop":
            del owner[key]
        elif change == "copy":
            owner[key] = copy.deepcopy(value_at(tree, draw(st.sampled_from(paths(tree)))))
        elif change == "rename" and isinstance(owner, dict):
            owner[draw(st.sampled_from(TEXTS) | st.text(max_size=8))] = owner.pop(key)
        elif change == "wrap":
            owner[key] = draw(st.sampled_from(([value], [value, value], {"x": value}, str(value)[:50], [[value]])))
        elif change == "add":
            new = draw(values)
            owner.insert(key, new) if isinstance(owner, list) else owner.setdefault(draw(st.text(max_size=4)), new)
        else:
            owner[key] = draw(values)
    return tree


# Markers that become JSON which `json.dumps` does not write.
_DEEP_LIST, _DEEP_OBJECT, _DIGITS = "@@deep-list@@", "@@deep-object@@", "@@digits@@"
ODD = st.sampled_from((_DEEP_LIST, _DEEP_OBJECT, _DIGITS))


def written(tree: Any) -> bytes:
    """JSON of a tree, with nesting and numbers that Python's own writer has none of."""
    text = json.dumps(tree, ensure_ascii=True, default=str)
    text = text.replace(f'"{_DEEP_LIST}"', "[" * DEEP + "]" * DEEP)
    text = text.replace(f'"{_DEEP_OBJECT}"', '{"a":' * DEEP + "1" + "}" * DEEP)
    return text.replace(f'"{_DIGITS}"', "1" * MANY_DIGITS).encode()


@st.composite
def json_bytes(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any] = VALUES) -> bytes:
    """JSON that was damaged as a tree, sometimes also as bytes."""
    content = written(draw(mutated(tree, values)))
    how = draw(st.integers(0, 14))
    if how == 0:
        return draw(damaged(content))
    if how == 1:
        return written(draw(mutated(tree, ODD, most=1)))
    if how == 2:  # the first key twice
        head, colon, rest = content.partition(b":")
        return head + colon + b"0," + head.lstrip(b"{") + colon + rest if colon else content
    if how == 3:
        return content.decode().encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig"))))
    return content


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with one to four damages: bits turned, ranges overwritten, cut out, repeated, cut off, put in."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(result) - 1)))
        length = draw(st.sampled_from((1, 1, 1, 2, 4, 8, 64)))
        change = draw(st.sampled_from(("flip", "flip", "set", "set", "put", "cut", "end", "repeat", "swap")))
        if change == "flip" and result:
            result[start] ^= 1 << draw(st.integers(0, 7))
        elif change == "set":
            result[start : start + length] = draw(
                st.sampled_from((b"\0", b"\xff", b"\x80", b"9", b'"', b"\x7f")) | st.binary(min_size=1, max_size=1)
            ) * min(length, len(result) - start)
        elif change == "put":
            result[start:start] = draw(st.binary(min_size=1, max_size=12))
        elif change == "cut":
            del result[start : start + length]
        elif change == "end":
            del result[start:]
        elif change == "repeat":
            result[start:start] = result[start : start + length]
        elif change == "swap":
            other = draw(st.integers(0, max(0, len(result) - length)))
            result[start : start + length] = result[other : other + length]
    return bytes(result)
