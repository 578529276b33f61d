"""Expressions for modules' names: what they match, and which could take for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.errors import CheckpointError
from promoe.stores.encodings.patterns import check, matches

NAME = "model.language_model.layers.47.mlp.experts.127.down_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*model.*layers.*mlp.*experts.*proj.*",
        r".*\.layers\.\d+\..*\.experts\.\d+\..*_proj$",
        r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
        r"(?:model\.)?language_model\.layers\.[0-9]+\.mlp\.experts\.[0-9]{1,3}\.\w+_proj\.?\w*",
        r"(model\.|language_model\.)?.*experts.*(q|k|v|o|gate|up|down)_proj",
        r"model(\.[a-z]){0}.*",
        r"model\..*[*+{].*",
        r"\*\+literal",
        r".*.*.*proj",
        r"(ab)*model.*",
        rf"model.*\.layers\.({'|'.join(map(str, range(60)))})\.mlp\..*",
    ],
)
def test_common_ones_are_matched(pattern: str) -> None:
    assert matches(pattern, NAME) == (re.match(pattern, NAME) is not None)
    assert matches(pattern, NAME, anywhere=True) == (re.search(pattern, NAME) is not None)


def test_from_the_beginning_or_anywhere() -> None:
    assert not matches("experts", NAME)
    assert matches("experts", NAME, anywhere=True)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)*b", r"((\.\d)?x)+", "(?:a*){2,9}", "((a+)b)*"])
def test_groups_that_repeat_and_have_choices(pattern: str) -> None:
    for use in (check, lambda pattern: matches(pattern, "a")):
        with pytest.raises(CheckpointError, match=r"repeats a group in parentheses .* Write it without the repeat"):
            use(pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (".*.*.*.*.*.*b", NAME),
        (".*ab" * 8 + "c", "ab" * 40),
        ("a?" * 30 + "a" * 30, "a" * 30),
        ("(a|a)?" * 24 + "b", "a" * 24),
        ("(a|a)" * 24 + "b", "a" * 24),
        (r"[a-z]*\w+\w*[^.]*a{2,}x", "a" * 100),
    ],
)
def test_too_many_ways(pattern: str, name: str) -> None:
    check(pattern)
    with pytest.raises(CheckpointError, match=r"could share out '.* ways: .* Write it with fewer of them"):
        matches(pattern, name)


@pytest.mark.parametrize("pattern", ["(", "*", "[", "a{2,1}", "(?P<a", "a{99999999999999999999}", r"\8"])
def test_what_is_no_expression(pattern: str) -> None:
    for use in (check, lambda pattern: matches(pattern, "a")):
        with pytest.raises(
            CheckpointError, match=r"regular expression for modules' names, which it is not: .* original one"
        ):
            use(pattern)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@given(st.text("ab.*+?()|[]{}1,\\^$", max_size=14), st.text("ab.1", max_size=12))
def test_any_expression_is_matched_as_python_does_or_refused(pattern: str, name: str) -> None:
    try:
        found = matches(pattern, name)
    except CheckpointError:
        return
    assert found == (re.match(pattern, name) is not None)
