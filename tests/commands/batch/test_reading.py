"""All lines of a batch: a name for each that no other has, and a digest of what it asks for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands.batch.test_command import write_lines
from promoe.commands.batch.reading import Line, read_batch
from promoe.commands.batch.source import Source


def read(folder: Path, values: list[Any], seed: int = 0, max_tokens: int = 9) -> list[Line]:
    return list(read_batch(Source(str(write_lines(folder / "in.jsonl", values))), seed, max_tokens))


def test_names_are_given_once(tmp_path: Path) -> None:
    a_line, bad = {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "x", "n": 0}
    lines = read(
        tmp_path,
        [
            a_line,
            {**a_line, "n": 0},
            bad,
            {"custom_id": "b", "prompt": "x"},
            {"custom_id": "line-6", "prompt": "x"},
            "{",
        ],
    )
    assert [line.name for line in lines] == ["a", "line-2", "b", "line-4", "line-5", "line-6"]
    assert [line.request is None for line in lines] == [False, True, True, True, True, True]
    assert [line.error is None for line in lines] == [True, False, False, False, False, False]


PLAIN: dict[str, Any] = {"custom_id": "a", "prompt": "x"}


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "y"},
        {"max_tokens": 10},
        {"temperature": 0.5},
        {"temperature": 0},
        {"n": 2},
        {"stop": "x"},
        {"seed": 4},
        {"min_p": 0.1},
        {"prompt": [120]},
    ],
)
def test_whatever_changes_an_answer_changes_the_digest(tmp_path: Path, changed: dict[str, Any]) -> None:
    before, after = (read(tmp_path, [{**PLAIN, **fields}])[0] for fields in ({}, changed))
    assert before.name == after.name
    assert before.digest != after.digest


def test_what_does_not_change_an_answer_does_not_change_the_digest(tmp_path: Path) -> None:
    before = read(tmp_path, [PLAIN])[0]
    assert (
        read(tmp_path, [{"user": "u", "prompt": "x", "custom_id": "a", "logprobs": False}])[0].digest == before.digest
    )
    assert read(tmp_path, [{**PLAIN, "max_tokens": 9}])[0].digest == before.digest


def test_options_that_lines_take_are_in_the_digest(tmp_path: Path) -> None:
    before = read(tmp_path, [PLAIN])[0].digest
    assert read(tmp_path, [PLAIN], seed=1)[0].digest != before
    assert read(tmp_path, [PLAIN], max_tokens=8)[0].digest != before
    own = {**PLAIN, "seed": 3, "max_tokens": 5}
    assert read(tmp_path, [own], seed=1, max_tokens=8)[0] == read(tmp_path, [own])[0]


@given(
    st.lists(st.sampled_from(["a", "b", "c", {"prompt": "x"}, {"prompt": "y"}, {"custom_id": "line-2"}]), max_size=6)
)
def test_a_line_that_moved_is_never_taken_for_another(values: list[Any]) -> None:
    """Where two lines have the same name and digest, they ask for the same."""
    lines = [{"custom_id": one, "prompt": one} if isinstance(one, str) else one for one in values]
    with tempfile.TemporaryDirectory() as folder:
        before = {line.name: line for line in read(Path(folder), lines)}
        for line in read(Path(folder), [{"prompt": "inserted"}, *lines]):
            known = before.get(line.name)
            if known is not None and known.digest == line.digest:
                assert known.request == line.request
