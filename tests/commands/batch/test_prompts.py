"""How much work a file of prompts is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint
from transformers import PreTrainedTokenizerBase

from commands.batch.test_command import write_lines
from promoe.commands.batch import prompts
from promoe.commands.batch.lines import LineError, read_request
from promoe.commands.batch.prompts import encoded, read_work
from promoe.commands.batch.source import Source
from promoe.commands.plan.throughput import BatchWork
from promoe.model.tokenizer import load_tokenizer


def written(path: Path, values: list[Any]) -> Source:
    return Source(str(write_lines(path, values)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")))


def test_the_work_of_a_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    lines = [{"custom_id": f"r{idx}", "prompt": [1] * (4 + 2 * (idx % 2)), "n": 1 + idx % 2} for idx in range(6)]
    lines.append({"custom_id": "longer than the context", "prompt": "x", "max_tokens": 10**9})
    lines.append({"custom_id": "long", "prompt": [1, 2, 3, 4, 5], "max_tokens": 100})
    source = written(tmp_path / "in.jsonl", [*lines, "no json", {"prompt": "x", "n": 10**6}])
    found = read_work(source, tokenizer, 20, 1000)
    assert found == BatchWork(10, pytest.approx(5.0), pytest.approx(28.0), 106)
    assert read_work(source, tokenizer, 20, 1000, {f"r{idx}" for idx in range(6)}) == BatchWork(1, 5.0, 100.0, 105)
    assert read_work(written(tmp_path / "bad.jsonl", ["no json"]), tokenizer, 20, 1000) is None


def test_the_longest_prompt_is_found_where_not_all_are_encoded(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "SAMPLED", 4)
    lines = [{"prompt": [1] * (300 if idx == 37 else 10)} for idx in range(50)]
    found = read_work(written(tmp_path / "in.jsonl", lines), tokenizer, 16, 1000)
    assert found == BatchWork(50, pytest.approx(10.0), 16.0, 316)


def test_what_cannot_be_encoded_is_refused_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    request = read_request(3, b'{"messages": [{"role": "poet", "content": "x"}]}', 0)
    with pytest.raises(LineError, match="no such role") as caught:
        encoded(tokenizer, request)
    assert caught.value.custom_id == "line-3"
