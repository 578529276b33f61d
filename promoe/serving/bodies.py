"""What a client sends, read: checked before anything is computed, and refused in words that say what to change."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from promoe.errors import shown
from promoe.running import LEAST_TEMPERATURE
from promoe.serving.requests import CHAT, Asked, Limits, Refused
from promoe.untrusted import loads

# Transformers compares each with every token of the vocabulary before it generates.
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 32

# Fields that say nothing about the answer's text, which the server does without.
_IGNORED = frozenset(
    [
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
        "verbosity",
    ]
)
# Fields that would change the answer and that Transformers' server does not heed, with the values that ask for nothing.
_UNHEEDED: dict[str, Collection[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "audio": (),
    "function_call": (),
    "functions": (),
    "prediction": (),
    "web_search_options": (),
    "generation_config": (),
}
# Numbers: least and most. Transformers takes a frequency penalty for a penalty of repetition, 1 more than it.
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "frequency_penalty": (0.0, 2.0)}
_TEMPLATE_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def read_request(path: str, content: bytes, limits: Limits) -> tuple[Asked, bytes]:
    """What a body asks for, and the body that Transformers' handler is given.

    Args:
        path: CHAT or COMPLETION.
        content: the body as it came.
        limits: see `Limits`.

    Raises:
        Refused: it cannot be read, asks for more than the limits, or for what the server does not have.
    """
    try:
        body = loads(content, constants=False)
    except ValueError as error:
        raise Refused(f"The body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(f"The body must be a JSON object. Got {shown(body)} instead.")
    body = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    _check_model(body, limits)
    _check_unheeded(body)
    for name, (least, most) in _RANGES.items():
        _number(body, name, least, most)
    asked = Asked(path, stream=_flag(body, "stream"))
    asked.new_tokens = _new_tokens(body, limits)
    asked.seed = _number(body, "seed", -(2**63), 2**63 - 1, whole=True)
    body.pop("seed", None)  # set when its turn comes: others' samples are being drawn now
    greedy = body.get("temperature", 1.0) < LEAST_TEMPERATURE
    if "temperature" in body or "top_p" in body:
        asked.samples = not greedy
    if greedy:
        body.pop("temperature")  # said above, and no divisor
    _check_stop(body)
    _check_bias(body, limits)
    if path == CHAT:
        _check_chat(body)
    elif not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise Refused(
            f"'prompt' must be one text that is not empty. Got {shown(body.get('prompt'))} instead.", param="prompt"
        )
    return asked, json.dumps(body).encode()


def _check_model(body: dict[str, Any], limits: Limits) -> None:
    name = body.setdefault("model", limits.model)
    if name != limits.model:
        raise Refused(
            f"There is no model {shown(name)} here. This server has {limits.model!r}.", 404, "model", "model_not_found"
        )


def _check_unheeded(body: dict[str, Any]) -> None:
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    for name in sorted(body.keys() & _UNHEEDED.keys()):
        value = body.pop(name)
        if value not in _UNHEEDED[name]:
            raise Refused(
                f"'{name}' is not supported. Got {shown(value)}. Leave it out.", param=name, code="unsupported_value"
            )


def _number(body: dict[str, Any], name: str, least: float, most: float, whole: bool = False) -> Any:
    value = body.get(name)
    if name not in body:
        return None
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise Refused(f"'{name}' must be {kind} from {least} to {most}. Got {shown(value)} instead.", param=name)
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"'{name}' must be true or false. Got {shown(value)} instead.", param=name)
    return value


def _new_tokens(body: dict[str, Any], limits: Limits) -> int | None:
    """The newer name wins; Transformers before 5.18 knows the older alone."""
    asked = [_number(body, name, 1, limits.new_tokens, whole=True) for name in ("max_completion_tokens", "max_tokens")]
    body.pop("max_completion_tokens", None)
    body.pop("max_tokens", None)
    wanted: int | None = asked[0] if asked[0] is not None else asked[1]
    return wanted


def _check_stop(body: dict[str, Any]) -> None:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stop is None:
        return
    if (
        not isinstance(stops, list)
        or not 0 < len(stops) <= MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops)
    ):
        raise Refused(
            f"'stop' must be a text of 1 to {MAX_STOP_CHARACTERS} characters, or up to {MAX_STOPS} of them. "
            f"Got {shown(stop)} instead.",
            param="stop",
        )


def _check_bias(body: dict[str, Any], limits: Limits) -> None:
    bias = body.get("logit_bias")
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise Refused(f"'logit_bias' must map token ids to numbers. Got {shown(bias)} instead.", param="logit_bias")
    for token, value in bias.items():
        known = (
            token.isdecimal() and token.isascii() and len(token) < 10 and int(token) < (limits.vocabulary or math.inf)
        )
        if not known:
            raise Refused(f"'logit_bias' names {shown(token)}, which is no token id of the model.", param="logit_bias")
        bias[token] = float(_number({"logit_bias": value}, "logit_bias", -100, 100))  # nothing else will do
    if not bias:
        body.pop("logit_bias")


def _check_chat(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"'messages' must be a list that is not empty. Got {shown(messages)} instead.", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(
                f"Message {number} must be an object with a 'role'. Got {shown(message)} instead.", param="messages"
            )
        if not _is_text(message.get("content")):
            raise Refused(
                f"The content of message {number} must be text, or parts of type text: this server reads no pictures, sounds "
                f"or files. Got {shown(message.get('content'))} instead.",
                param="messages",
            )
        _check_calls(message, number)
    arguments = body.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict) or arguments.keys() & _TEMPLATE_PARAMETERS:
        raise Refused(
            f"'chat_template_kwargs' must be an object of the template's own variables. Got {shown(arguments)} instead.",
            param="chat_template_kwargs",
        )


def _check_calls(message: dict[str, Any], number: int) -> None:
    calls = message.get("tool_calls")
    if calls in (None, []):
        message.pop(
            "tool_calls", None
        )  # clients send an answer back as they got it; with it, its text would be left out
        return
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise Refused(
            f"The 'tool_calls' of message {number} must be a list of objects whose 'function' has a 'name' and 'arguments'. "
            f"Got {shown(calls)} instead.",
            param="messages",
        )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _is_text(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
