from __future__ import annotations

import json
from typing import Any

import pytest

from promoe.commands.serve.bodies import read_requests
from promoe.commands.serve.requests import CHAT, COMPLETION, Asked, Limits, Refused

LIMITS = Limits("m", new_tokens=100, vocabulary=50)
MESSAGES = [{"role": "user", "content": "hi"}]


def read(path: str = CHAT, **fields: Any) -> tuple[Asked, dict[str, Any]]:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    ((asked, body),) = read_requests(path, json.dumps({**prompt, **fields}).encode(), LIMITS)
    return asked, json.loads(body)


def test_a_plain_request_names_the_model_and_asks_for_nothing_special() -> None:
    asked, body = read()
    assert body == {"messages": MESSAGES, "model": "m"}
    assert (asked.path, asked.stream, asked.new_tokens, asked.samples, asked.seed) == (CHAT, False, None, None, None)
    assert read(COMPLETION)[1] == {"prompt": "hi", "model": "m"}


def test_lengths_come_under_either_name_and_the_newer_one_wins() -> None:
    for fields, expected in (
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_tokens": 100}, 100),
    ):
        asked, body = read(**fields)
        assert asked.new_tokens == expected
        assert "max" not in "".join(body)


@pytest.mark.parametrize(
    ("fields", "samples", "left"),
    [
        ({"temperature": 0}, False, {}),
        ({"temperature": 1e-40}, False, {}),
        ({"temperature": 1e-5}, True, {"temperature": 1e-5}),
        ({"temperature": 0.7}, True, {"temperature": 0.7}),
        ({"top_p": 0.5}, True, {"top_p": 0.5}),
        ({"temperature": 0, "top_p": 0.5}, False, {"top_p": 0.5}),
    ],
)
def test_a_temperature_means_sampling_unless_it_is_0(
    fields: dict[str, float], samples: bool, left: dict[str, float]
) -> None:
    asked, body = read(**fields)
    assert asked.samples is samples
    assert {name: body[name] for name in body if name in ("temperature", "top_p")} == left


def test_seeds_are_kept_for_the_turn_and_not_set_on_arrival() -> None:
    asked, body = read(seed=-3)
    assert asked.seed == -3
    assert "seed" not in body


def test_what_says_nothing_about_the_text_and_what_asks_for_nothing_is_dropped() -> None:
    harmless = {"user": "u", "stream_options": {"include_usage": True}, "n": 1, "logprobs": False, "temperature": None}
    neutral = {"response_format": {"type": "text"}, "presence_penalty": 0.0, "tool_choice": "auto", "logit_bias": {}}
    assert read(**harmless, **neutral)[1] == {"messages": MESSAGES, "model": "m"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read(tools=tools)[1]["tools"] == tools
    assert "tools" not in read(tools=tools, tool_choice="none")[1]


def test_what_transformers_understands_is_passed_on() -> None:
    fields = {
        "stop": ["a", "b"],
        "stream": True,
        "frequency_penalty": 0.5,
        "logit_bias": {"49": -1.5},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    asked, body = read(**fields)
    assert asked.stream
    assert {name: body[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "param", "match"),
    [
        ({"model": "other"}, "model", "There is no model 'other' here. This server has 'm'"),
        ({"max_tokens": 101}, "max_tokens", "whole number from 1 to 100. Got 101"),
        ({"max_tokens": 0}, "max_tokens", "Got 0"),
        ({"max_tokens": True}, "max_tokens", "Got True"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "Got 1.5"),
        ({"temperature": 2.1}, "temperature", "a number from 0.0 to 2.0"),
        ({"temperature": "hot"}, "temperature", "Got 'hot'"),
        ({"top_p": -0.1}, "top_p", "from 0.0 to 1.0"),
        ({"frequency_penalty": -1}, "frequency_penalty", "from 0.0"),
        ({"seed": 2**63}, "seed", "whole number"),
        ({"top_k": 1.5}, "top_k", "whole number from -1"),
        ({"min_p": 2}, "min_p", "from 0.0 to 1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.5}, "frequency_penalty", "Leave one out"),
        ({"n": True}, "n", "'n' is not supported. Got True"),
        ({"typical_p": 1}, "typical_p", "no field 'typical_p' for /v1/chat/completions. Leave it out"),
        ({"prompt": "hi"}, "prompt", "no field 'prompt' for /v1/chat/completions"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"n": 2}, "n", "'n' is not supported. Got 2"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"presence_penalty": 1}, "presence_penalty", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"generation_config": "{}"}, "generation_config", "not supported"),
        ({"stop": []}, "stop", "up to 4"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ""}, "stop", "1 to 32 characters"),
        ({"stop": "a" * 33}, "stop", "1 to 32 characters"),
        ({"logit_bias": {"50": 1}}, "logit_bias", "'50', which is no token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "must map"),
        ({"messages": []}, "messages", "a list that is not empty"),
        ({"messages": "hi"}, "messages", "Got 'hi'"),
        ({"messages": ["hi"]}, "messages", "Message 0 must be an object"),
        ({"messages": [{"content": "hi"}]}, "messages", "with a 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "no pictures"),
        (
            {"messages": [{"role": "assistant", "tool_calls": "f"}]},
            "messages",
            "'tool_calls' of message 0 must be a list",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [1]}]}, "messages", "of message 1 must be"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "messages", "must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", "'arguments'"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "own variables"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "own variables"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "must be an object"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, match: str) -> None:
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert refused.value.param == param
    assert match in str(refused.value)
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize(
    "prompt", ["", [], ["a", ""], [[1], "a", []], [1, "a"], [1, -1], [1.5], [True], 3, None, ["a"] * 33, {"a": 1}]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(Refused, match="'prompt' must be a text that is not empty") as refused:
        read(COMPLETION, prompt=prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("hi", ["hi"], [None]),
        (["hi"], ["hi"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([7, 49], ["."], [[7, 49]]),
        ([[7, 49]], ["."], [[7, 49]]),
        ([[7], "a", [8, 9]], [".", "a", "."], [[7], None, [8, 9]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt: Any, texts: list[str], ids: list[Any]) -> None:
    requests = read_requests(COMPLETION, json.dumps({"prompt": prompt, "max_tokens": 3}).encode(), LIMITS)
    assert [json.loads(body)["prompt"] for _, body in requests] == texts
    assert [asked.prompt_ids for asked, _ in requests] == ids
    assert {asked.new_tokens for asked, _ in requests} == {3}


def test_token_ids_are_of_the_model_and_several_prompts_are_not_streamed() -> None:
    with pytest.raises(Refused, match="has the token id 50; the model has ids up to 49"):
        read(COMPLETION, prompt=[[1], [50, 2]])
    with pytest.raises(Refused, match="one prompt at a time"):
        read(COMPLETION, prompt=["a", "b"], stream=True)


@pytest.mark.parametrize(
    ("fields", "settings", "samples"),
    [
        ({"top_k": 5}, {"top_k": 5}, True),
        ({"top_k": -1}, {"top_k": 0}, True),
        ({"min_p": 0.1, "top_k": 3, "temperature": 0}, {"top_k": 3, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, None),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0}, {"repetition_penalty": 1.1}, None),
    ],
)
def test_what_other_servers_let_clients_set(fields: dict[str, Any], settings: dict[str, Any], samples: Any) -> None:
    for path in (CHAT, COMPLETION):
        asked, body = read(path, **fields)
        assert (asked.settings, asked.samples) == (settings, samples)
        assert not body.keys() & {"top_k", "min_p", "repetition_penalty", "frequency_penalty"}
        generation = Generation()
        asked.admit(1, generation, LIMITS)
        assert {name: getattr(generation, name) for name in settings} == settings


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"n": 1, "n": 2}', b"\xff", b'["\\ud800"]']
)
def test_bodies_that_are_no_json_object(content: bytes) -> None:
    with pytest.raises(Refused, match="body"):
        read_requests(CHAT, content, LIMITS)


def test_calls_of_tools_are_passed_on_and_none_at_all_is_left_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert read(messages=said)[1]["messages"] == said
    for none in (None, []):
        asked_again = [{"role": "assistant", "content": "hi", "tool_calls": none}]
        assert read(messages=asked_again)[1]["messages"] == [{"role": "assistant", "content": "hi"}]


class Generation:
    """What the limits write into a `GenerationConfig`."""

    max_new_tokens = 1024
    do_sample = False


def test_answers_get_what_they_ask_for_or_the_limit_or_what_the_context_leaves() -> None:
    limits = Limits("m", prompt_tokens=60, new_tokens=50, context=100)
    for wanted, prompt, expected in ((None, 10, 50), (None, 60, 40), (7, 60, 7), (40, 60, 40)):
        generation = Generation()
        asked = Asked(CHAT, new_tokens=wanted, samples=True)
        asked.admit(prompt, generation, limits)
        assert generation.max_new_tokens == expected
        assert generation.do_sample
        assert asked.prompt_tokens == prompt


@pytest.mark.parametrize(
    ("path", "prompt", "wanted", "param"),
    [(CHAT, 61, None, "messages"), (COMPLETION, 61, None, "prompt"), (CHAT, 60, 41, "max_tokens")],
)
def test_too_long_for_the_limits_or_the_context(path: str, prompt: int, wanted: int | None, param: str) -> None:
    limits = Limits("m", prompt_tokens=60, new_tokens=50, context=100)
    with pytest.raises(Refused) as refused:
        Asked(path, new_tokens=wanted).admit(prompt, Generation(), limits)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")
    assert str(prompt) in str(refused.value)


def test_a_prompt_that_fills_the_context_leaves_no_answer() -> None:
    with pytest.raises(Refused, match=r"context is 100 tokens\. The prompt has 100"):
        Asked(CHAT).admit(100, Generation(), Limits("m", context=100))
