"""How much work a file of prompts is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_checkpoint import byte_tokenizer

from promoe.commands.batch.lines import LineError, read_request
from promoe.commands.batch.prompts import PromptLengths, encoded
from promoe.commands.plan.throughput import BatchWork


def lengths(values: list[Any], max_tokens: int = 20) -> PromptLengths:
    found = PromptLengths(byte_tokenizer(), max_tokens)
    for number, value in enumerate(values, 1):
        found.add(read_request(number, json.dumps(value).encode(), 0))
    return found


def test_the_work_of_a_file() -> None:
    lines = [{"prompt": [1] * (4 + 2 * (idx % 2)), "n": 1 + idx % 2} for idx in range(6)]
    lines.append({"prompt": "x", "max_tokens": 10**9})
    lines.append({"prompt": [1, 2, 3, 4, 5], "max_tokens": 100})
    found = lengths(lines).work(1000)
    assert found == BatchWork(10, pytest.approx((3 * 4 + 6 * 6 + 5) / 10), pytest.approx(28.0), 105)
    assert lengths(lines[:6]).work(None) == BatchWork(9, pytest.approx(48 / 9), 20.0, 26)
    assert lengths(lines[:6]).work(23) == BatchWork(9, pytest.approx(48 / 9), pytest.approx(159 / 9), 23)
    assert lengths([]).work(1000) is None
    assert lengths(lines[6:7]).work(1000) is None


def test_the_longest_line_counts_whatever_its_bytes() -> None:
    """Lines with long fields beside the prompt, and prompts of token ids, have more bytes than their tokens need."""
    lines: list[Any] = [{"prompt": "x" * 50, "user": "u" * 5000} for _ in range(20)]
    lines[13:13] = [{"prompt": "x" * 2500}]
    assert lengths(lines).work(None) == BatchWork(21, pytest.approx(3500 / 21), 20.0, 2520)


def test_what_cannot_be_encoded_is_refused_by_name() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    request = read_request(3, b'{"messages": [{"role": "poet", "content": "x"}]}', 0)
    with pytest.raises(LineError, match="no such role") as caught:
        encoded(tokenizer, request)
    assert caught.value.custom_id == "line-3"
    found = PromptLengths(tokenizer, 5)
    found.add(request)
    assert found.work(None) is None
