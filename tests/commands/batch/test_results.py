"""The file of answers: whole lines, one writer, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from promoe.commands.batch.results import ResultFile, answer_line, error_line
from promoe.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        assert results.done == set()
        results.add(answer_line("a", {"text": "é\n"}))
        results.add(error_line("b", "no"))
    return path


def test_lines_are_added_whole(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["response"]["body"] == {"text": "é\n"}
    assert (lines[1]["custom_id"], lines[1]["response"], lines[1]["error"]["message"]) == ("b", None, "no")
    with ResultFile(path) as results:
        assert results.done == {"a", "b"}
        results.add(error_line("c", "no"))
        assert results.done == {"a", "b", "c"}
    assert len(path.read_bytes().splitlines()) == 3


def test_a_torn_line_is_removed_wherever_it_was_torn(path: Path) -> None:
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content) + 1):
        path.write_bytes(content[:end])
        with ResultFile(path) as results:
            assert results.done == ({"a", "b"} if end == len(content) else {"a"})
        assert path.read_bytes() == (content if end == len(content) else content[:first])


@pytest.mark.parametrize("other", [b"precious", b"precious\n", b'{"id": 5}\n', b"\0" * 50, b'{"custom_id": "q"}\n'])
@pytest.mark.parametrize("answers", [True, False])
def test_another_file_is_not_written_into(path: Path, other: bytes, answers: bool) -> None:
    content = other + path.read_bytes() if answers else other
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"Line 1 of .* is no answer of a batch"):
        ResultFile(path)
    assert path.read_bytes() == content


def test_two_cannot_write_at_once(path: Path) -> None:
    with ResultFile(path), pytest.raises(ConfigError, match="Another process writes"):
        ResultFile(path)
    ResultFile(path).close()
