"""Lines of a batch file: what they ask for, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.commands.batch import lines
from promoe.commands.batch.lines import CHAT, COMPLETION, LineError, Request, read_lines, read_request
from promoe.runtime.sampling import Sampling

MESSAGES = [{"role": "user", "content": "Hello"}]


def read(value: Any, number: int = 7, seed: int = 0) -> Request:
    return read_request(number, json.dumps(value).encode(), seed)


def test_an_openai_request_is_read() -> None:
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 2}
    request = read({"custom_id": "a", "method": "POST", "url": CHAT, "body": {**body, "stop": "."}})
    assert request == Request("a", CHAT, MESSAGES, 9, 2, (".",), Sampling(0.5, 0.9, seed=3))


def test_a_plain_line_has_the_fields_of_a_body() -> None:
    request = read({"prompt": "Hello", "max_completion_tokens": 5, "max_tokens": 6})
    assert (request.custom_id, request.url, request.content) == ("line-7", COMPLETION, "Hello")
    assert request.max_tokens == 5
    assert request.sampling == Sampling(seed=request.sampling.seed)
    assert read({"messages": MESSAGES, "custom_id": "b"}).url == CHAT
    assert read({"prompt": [1, 2, 3]}).content == [1, 2, 3]


def test_lines_without_a_seed_get_one_of_their_own() -> None:
    seeds = {read({"prompt": "x"}, number, seed).sampling.seed for number in range(5) for seed in range(5)}
    assert len(seeds) == 25
    assert read({"prompt": "x"}).sampling == read({"prompt": "x"}).sampling


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "must be a JSON object"),
        ({"prompt": ""}, "'prompt' must be a text or a list of token ids"),
        ({"prompt": [1, True]}, "'prompt' must be a text or a list of token ids"),
        ({"prompt": [-1]}, "'prompt' must be a text or a list of token ids"),
        ({}, "'prompt' must be"),
        ({"messages": []}, "'messages' must be a list"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "content of message 0 must be text"),
        ({"messages": [{"content": "x"}]}, "Message 0 must be an object with a 'role'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "'tool_calls' of message 0"),
        ({"prompt": "x", "colour": 1}, "There is no field 'colour'"),
        ({"prompt": "x", "n": 10**9}, "'n' must be a whole number from 1 to 128"),
        ({"prompt": "x", "n": 1.5}, "'n' must be a whole number"),
        ({"prompt": "x", "max_tokens": 0}, "'max_tokens' must be a whole number from 1"),
        ({"prompt": "x", "temperature": True}, "'temperature' must be a number from 0 to 2"),
        ({"prompt": "x", "logprobs": 3}, "'logprobs' is not supported"),
        ({"prompt": "x", "stream": True}, "'stream' is not supported"),
        ({"prompt": "x", "stop": ["a"] * 5}, "'stop' must be a text, or up to 4"),
        ({"prompt": "x", "custom_id": 5}, "'custom_id' must be a text"),
        ({"body": []}, "'body' must be an object"),
        ({"body": {"messages": MESSAGES}, "url": "/v1/embeddings"}, "'url' must be"),
        ({"body": {"messages": MESSAGES}, "method": "GET"}, "'method' must be 'POST'"),
        ({"body": {"messages": MESSAGES}, "prompt": "x"}, "no field 'prompt' beside 'body'"),
    ],
)
def test_what_cannot_be_answered_is_refused(value: Any, message: str) -> None:
    with pytest.raises(LineError, match=message):
        read(value)


def test_a_refused_line_keeps_its_name() -> None:
    with pytest.raises(LineError) as error:
        read({"custom_id": "mine", "prompt": "x", "n": 0})
    assert error.value.custom_id == "mine"


def test_fields_that_ask_for_nothing_are_left_out() -> None:
    plain = read({"messages": MESSAGES})
    for number in (0, 0.0):
        assert read({"messages": MESSAGES, "frequency_penalty": number, "presence_penalty": number}) == plain
    neutral = {
        "n": 1,
        "best_of": 1.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "suffix": "",
        "stream": False,
    }
    said = {
        "user": "u",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "verbosity": "low",
    }
    assert read({"messages": MESSAGES, **neutral, **said, "response_format": {"type": "text"}}) == plain
    for name, value in {"frequency_penalty": 0.5, "stream": 0, "logit_bias": {"5": 1}, "tools": [{}]}.items():
        with pytest.raises(LineError, match=f"'{name}' is not supported"):
            read({"messages": MESSAGES, name: value})


def test_messages_in_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).content == [
        {"role": "user", "content": "Hello you"}
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    (message,) = read({"messages": messages}).content
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"temperature": 0}, {"do_sample": False}),
        ({"top_p": 0.5}, {"do_sample": True, "top_p": 0.5}),
        ({"top_k": -1}, {"do_sample": True, "top_k": 0}),
        ({"n": 4}, {"do_sample": True}),
        ({"n": 4, "temperature": 0}, {"do_sample": False}),
        ({"n": 4, "temperature": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_what_a_line_does_not_say_is_left_to_the_model(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    assert read({"prompt": "x", **fields}).sampling.settings == settings


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b'{"custom_id": "mine", "prompt": "\\ud83d"}', "mine"),
        (b'{"custom_id": "mine", "prompt": "\xed\xa0\xbd"}', "mine"),
        (b'{"custom_id": "mine", "prompt": NaN}', "mine"),
        (b'{"custom_id": "mine", "prompt": "x", "prompt": "y"}', "mine"),
        (b'{"custom_id": "mine", "prompt": "x", "custom_id": "yours"}', "line-3"),
        (b'{"custom_id": "\\ud83d", "prompt": "x"}', "line-3"),
        (b'{"body": {"custom_id": "mine"}, "prompt": NaN}', "line-3"),
        (b'[["custom_id", "mine"], NaN]', "line-3"),
        (b'{"custom_id": "line-8", "prompt": NaN}', "line-3"),
        (b'{"custom_id": "mine", "prompt', "line-3"),
    ],
)
def test_a_line_that_is_no_json_keeps_its_name_where_it_can_be_told(line: bytes, name: str) -> None:
    with pytest.raises(LineError, match="cannot be read as JSON") as caught:
        read_request(3, line, 0)
    assert caught.value.custom_id == name


def test_half_a_character_is_named() -> None:
    with pytest.raises(LineError, match=r"half a character, \\ud83d, without its other half"):
        read_request(3, b'{"prompt": "x \\ud83d"}', 0)
    assert read_request(3, b'{"prompt": "\\ud83d\\ude00"}', 0).content == "\U0001f600"


@pytest.mark.parametrize("line", [b"{", b"\xff", b'{"prompt": "x", "prompt": "y"}', b'{"prompt": NaN}', b"[" * 10**5])
def test_what_is_no_json_is_refused(line: bytes) -> None:
    with pytest.raises(LineError, match="cannot be read as JSON") as error:
        read_request(3, line, 0)
    assert error.value.custom_id == "line-3"


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_any_field_is_read_or_refused(value: Any) -> None:
    for name in ("prompt", "messages", "n", "stop", "seed", "temperature", "custom_id", "url", "body", "stream"):
        with suppress(LineError):
            assert isinstance(read({"prompt": "x", name: value}), Request)


def test_long_lines_are_refused_and_the_next_ones_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + b"x" * 100 + b'\n{"prompt": "b"}')
    found = list(read_lines(path))
    assert [number for number, _ in found] == [1, 3, 4]
    assert found[2][1] == b'{"prompt": "b"}'
    with pytest.raises(LineError, match="Split it"):
        read_request(*found[1], 0)
