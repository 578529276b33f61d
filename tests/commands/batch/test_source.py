"""Prompts from a file of lines, and from a column of a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from commands.batch.test_command import answers, write_lines
from promoe import cli
from promoe.commands.batch.source import Source
from promoe.errors import ConfigError


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    source = Source(str(write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, "", {"prompt": "b"}])))
    assert [(number, json.loads(line)) for number, line in source.lines()] == [
        (1, {"prompt": "a"}),
        (3, {"prompt": "b"}),
    ]
    with pytest.raises(ConfigError, match="cannot be read"):
        list(Source(str(tmp_path / "nothing.jsonl")).lines())


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    chat = [{"role": "user", "content": "Hello"}]
    (tmp_path / "data").mkdir()
    write_lines(
        tmp_path / "data" / "train.jsonl", [{"text": f"word {idx}", "chat": chat, "n": idx} for idx in range(3)]
    )
    return tmp_path / "data"


def test_a_column_of_a_data_set_becomes_lines(data_set: Path) -> None:
    texts = [json.loads(line) for _, line in Source(str(data_set), "text").lines()]
    assert texts == [{"prompt": f"word {idx}"} for idx in range(3)]
    chats = [json.loads(line) for _, line in Source(str(data_set), "chat").lines()]
    assert chats == [{"messages": [{"role": "user", "content": "Hello"}]}] * 3
    with pytest.raises(ConfigError, match="no column 'answer', but chat, n, text"):
        list(Source(str(data_set), "answer").lines())
    with pytest.raises(ConfigError, match="split test, cannot be read"):
        list(Source(str(data_set), "text", "test").lines())
    with pytest.raises(ConfigError, match="cannot be read"):
        list(Source(str(data_set / "nowhere"), "text").lines())


def test_a_data_set_is_answered(data_set: Path, tmp_path: Path) -> None:
    checkpoint, out = str(write_checkpoint(tmp_path / "checkpoint")), tmp_path / "out.jsonl"
    more = ["--column", "text", "--max-tokens", "2", "--cache", "50%"]
    assert cli.main(["batch", checkpoint, str(data_set), "--out", str(out), *more]) == 0
    assert set(answers(out)) == {"line-1", "line-2", "line-3"}
