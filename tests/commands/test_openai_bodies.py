"""What bodies to a server and lines of a file have in common, and that both mean the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import build
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import Modality

from promoe.commands.batch.lines import read_request
from promoe.commands.openai_bodies import asks_for_nothing, plain_messages
from promoe.commands.serve.bodies import read_requests
from promoe.commands.serve.requests import CHAT, Limits
from promoe.runtime.token_choice import TokenChoices

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LIMITS = Limits("m", new_tokens=100)
OWN_SETTINGS = ({}, {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
SETTINGS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def test_zero_asks_for_nothing_in_every_spelling() -> None:
    for value in (0, 0.0, -0.0):
        assert asks_for_nothing(value, (0,))
    assert not asks_for_nothing(False, (0,))
    assert not asks_for_nothing(0, (False,))
    assert asks_for_nothing({"type": "text"}, ({"type": "text"},))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ],
)
def test_templates_are_given_what_transformers_server_gives_them(message: dict[str, Any]) -> None:
    (expected,) = ChatCompletionHandler.get_processor_inputs_from_messages([message], Modality.LLM)
    assert plain_messages([message]) == [expected]


@pytest.mark.parametrize("own", OWN_SETTINGS, ids=["plain", "qwen"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.5},
        {"top_k": 5},
        {"top_k": -1},
        {"min_p": 0.1},
        {"temperature": 0, "top_p": 0.5},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 3},
        {"repetition_penalty": 1.3},
    ],
)
def test_a_line_and_a_request_mean_the_same(fields: dict[str, Any], own: dict[str, Any]) -> None:
    """What neither says comes from the model's own settings."""
    model = build("qwen3_moe")
    model.generation_config.update(**own)
    body = {"messages": MESSAGES, **fields}
    line = read_request(1, json.dumps(body).encode(), 0)
    in_batch = TokenChoices(model)._config(line.sampling.settings)
    ((asked, passed_on),) = read_requests(CHAT, json.dumps(body).encode(), LIMITS)
    # As Transformers' handler reads the rest of a body.
    served = model.generation_config
    for name in ("temperature", "top_p"):
        if (value := json.loads(passed_on).get(name)) is not None:
            setattr(served, name, float(value))
    asked.admit(5, served, LIMITS)
    completed, _ = model._prepare_generation_config(served)
    used = [name for name in SETTINGS if completed.do_sample or name in ("do_sample", "repetition_penalty")]
    assert {name: getattr(in_batch, name) for name in used} == {name: getattr(completed, name) for name in used}
