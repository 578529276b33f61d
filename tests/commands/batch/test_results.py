"""The file of answers: whole lines, one writer, nothing twice, nothing of another model or another line."""

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
        assert results.done == {}
        results.belong_to("aa", "models/A")
        results.add(answer_line("a", {"text": "é\n", "model": "models/A"}), "11")
        results.add(error_line("b", "no"), "22")
    return path


def test_lines_are_added_whole(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["response"]["body"] == {"text": "é\n", "model": "models/A", "system_fingerprint": "fp_aa"}
    assert (lines[1]["custom_id"], lines[1]["response"], lines[1]["error"]["message"]) == ("b", None, "no")
    assert [line["id"] for line in lines] == ["batch_req_aa_11", "batch_req_aa_22"]
    with ResultFile(path) as results:
        assert results.done == {"a": "11", "b": "22"}
        results.belong_to("aa", "models/A")
        results.add(error_line("c", "no"), "33")
        assert results.done == {"a": "11", "b": "22", "c": "33"}
    assert len(path.read_bytes().splitlines()) == 3


def test_answers_of_another_model_are_not_added_to(path: Path) -> None:
    content = path.read_bytes()
    with ResultFile(path) as results, pytest.raises(ConfigError, match=r"of 'models/A' \(aa\), and this is 'B' \(bb\)"):
        results.belong_to("bb", "B")
    only_errors = content.splitlines(keepends=True)[1]
    path.write_bytes(only_errors)
    with ResultFile(path) as results, pytest.raises(ConfigError, match=r"a model without a name \(aa\)"):
        results.belong_to("bb", "B")
    assert path.read_bytes() == only_errors


def test_lines_that_ask_for_something_else_are_named(path: Path) -> None:
    with ResultFile(path) as results:
        results.check_unchanged({})
        results.check_unchanged({"a": "11", "c": "77"})
        with pytest.raises(ConfigError, match=r"answers to 1 lines that ask for something else now \(a\)"):
            results.check_unchanged({"a": "12", "b": "22"})


def test_a_torn_line_is_removed_wherever_it_was_torn(path: Path) -> None:
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content) + 1):
        path.write_bytes(content[:end])
        with ResultFile(path) as results:
            assert set(results.done) == ({"a", "b"} if end == len(content) else {"a"})
        assert path.read_bytes() == (content if end == len(content) else content[:first])


@pytest.mark.parametrize(
    "other",
    [
        b"precious",
        b"precious\n",
        b'{"id": 5}\n',
        b"\0" * 50,
        b'{"custom_id": "q"}\n',
        b'{"id": "batch_req_abc", "custom_id": "q", "response": null, "error": {}}\n',  # another program's answer
        b'{"id": "batch_req_aa_11", "custom_id": 5, "response": null, "error": {}}\n',
    ],
)
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
