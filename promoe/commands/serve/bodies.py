"""Reads what a client sends: it is checked before anything is computed, and refused in words that say what to change."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from promoe.commands.openai_bodies import IGNORED, UNSUPPORTED, asks_for_nothing, check_messages
from promoe.commands.serve.requests import CHAT, COMPLETION, Asked, Limits, Refused
from promoe.errors import shown
from promoe.files import loads
from promoe.runtime.sampling import LEAST_TEMPERATURE

# Transformers compares each with every token of the vocabulary before it generates.
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 32

# Transformers' server ignores these, too.
_UNSUPPORTED: dict[str, Collection[Any]] = {**UNSUPPORTED, "n": (1,)}
# Numbers: least and most. Transformers takes a frequency penalty x for a repetition penalty 1 + x.
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "frequency_penalty": (0.0, 2.0)}
# Numbers that OpenAI's interface does not have and other servers do, under the names that they have in Transformers.
_SETTINGS = {"min_p": (0.0, 1.0), "repetition_penalty": (0.01, 10.0)}
# Fields that are passed on to Transformers' handlers.
_PASSED_ON = {
    CHAT: frozenset(["messages", "tools", "chat_template_kwargs"]),
    COMPLETION: frozenset(["prompt"]),
}
_PASSED_ON_BY_BOTH = frozenset(["model", "stream", "stop", "logit_bias", *_RANGES])
# Transformers' handler encodes this text; then the client's own tokens are put in its place.
_PLACEHOLDER = "."
MAX_PROMPTS = 32
_TEMPLATE_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def read_requests(path: str, content: bytes, limits: Limits) -> list[tuple[Asked, bytes]]:
    """Return what a body asks for, and the body that Transformers' handler is given: one of each for every prompt in it.

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
        raise Refused(f"The body cannot be read as JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(f"The body must be a JSON object. Got {shown(body)} instead.")
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    if path == CHAT:
        _check_chat(body)
        return [_read(path, body, limits)]
    prompts = _prompts(body, limits)
    if len(prompts) > 1 and body.get("stream"):
        raise Refused(
            f"'stream' answers one prompt at a time. Got {len(prompts)}. Send one request for each.", param="stream"
        )
    requests = []
    for prompt in prompts:
        text, ids = (prompt, None) if isinstance(prompt, str) else (_PLACEHOLDER, prompt)
        asked, own_body = _read(path, {**body, "prompt": text}, limits)
        asked.prompt_ids = ids
        requests.append((asked, own_body))
    return requests


def _read(path: str, body: dict[str, Any], limits: Limits) -> tuple[Asked, bytes]:
    _check_model(body, limits)
    _check_unsupported(body)
    for name, (least, most) in _RANGES.items():
        _number(body, name, least, most)
    stream = body.get("stream", False)
    _must_be(isinstance(stream, bool), "stream", "true or false", stream)
    asked = Asked(path, stream=stream)
    asked.new_tokens = _new_tokens(body, limits)
    asked.seed = _number(body, "seed", -(2**63), 2**63 - 1, whole=True)
    body.pop("seed", None)  # set when its turn comes: now it would change another request's samples
    asked.settings = _settings(body)
    greedy = body.get("temperature", 1.0) < LEAST_TEMPERATURE
    if body.keys() & {"temperature", "top_p"} or asked.settings.keys() & {"top_k", "min_p"}:
        asked.samples = not greedy
    if greedy:
        body.pop("temperature")  # said above, and no divisor
    _check_stop(body)
    _check_bias(body, limits)
    for name in sorted(body.keys() - _PASSED_ON_BY_BOTH - _PASSED_ON[path]):
        raise Refused(
            f"This server has no field '{name}' for {path}. Leave it out.", param=name, code="unknown_parameter"
        )
    return asked, json.dumps(body).encode()


def _prompts(body: dict[str, Any], limits: Limits) -> list[str | list[int]]:
    """Return the prompts of a completion: a text, a list of texts, token ids, or a list of such lists."""
    prompt = body.get("prompt")
    one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and _is_id(prompt[0]))
    prompts: Any = [prompt] if one else prompt
    _must_be(
        isinstance(prompts, list) and 0 < len(prompts) <= MAX_PROMPTS and all(map(_is_prompt, prompts)),
        "prompt",
        f"a text that is not empty, a list of token ids, or a list of up to {MAX_PROMPTS} of either",
        prompt,
    )
    largest = max((max(ids) for ids in prompts if isinstance(ids, list)), default=0)
    if largest >= (limits.vocabulary or math.inf):
        raise Refused(
            f"'prompt' has the token id {largest}; the model has ids up to {(limits.vocabulary or 0) - 1}.",
            param="prompt",
        )
    return list(prompts)


def _is_prompt(prompt: Any) -> bool:
    return bool(prompt) and (isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_id, prompt))))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _settings(body: dict[str, Any]) -> dict[str, float | int]:
    """Take out of a body the settings that OpenAI's interface does not have and other servers do."""
    found: dict[str, float | int] = {}
    if (top_k := _number(body, "top_k", -1, 2**31, whole=True)) is not None:
        found["top_k"] = max(0, top_k)  # -1 is other servers' word for all tokens
    for name, (least, most) in _SETTINGS.items():
        if (value := _number(body, name, least, most)) is not None:
            found[name] = float(value)
    if "repetition_penalty" in found and body.get("frequency_penalty"):
        raise Refused(
            "'frequency_penalty' is taken for a penalty of repetition, and so there cannot be 'repetition_penalty' beside it. "
            "Leave one out.",
            param="frequency_penalty",
        )
    if "repetition_penalty" in found:
        body.pop("frequency_penalty", None)
    for name in ("top_k", *_SETTINGS):
        body.pop(name, None)
    return found


def _check_model(body: dict[str, Any], limits: Limits) -> None:
    name = body.setdefault("model", limits.model)
    if name != limits.model:
        raise Refused(
            f"There is no model {shown(name)} here. This server has {limits.model!r}.", 404, "model", "model_not_found"
        )


def _check_unsupported(body: dict[str, Any]) -> None:
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    for name in sorted(body.keys() & _UNSUPPORTED.keys()):
        value = body.pop(name)
        if not asks_for_nothing(value, _UNSUPPORTED[name]):
            raise Refused(
                f"'{name}' is not supported. Got {shown(value)}. Leave it out.", param=name, code="unsupported_value"
            )


def _number(body: dict[str, Any], name: str, least: float, most: float, whole: bool = False) -> Any:
    if name not in body:
        return None
    value, kind = body[name], "a whole number" if whole else "a number"
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    _must_be(is_number and least <= value <= most, name, f"{kind} from {least} to {most}", value)
    return value


def _must_be(holds: bool, name: str, what: str, found: object) -> None:
    """Raise Refused unless a field is what it must be."""
    if not holds:
        raise Refused(f"'{name}' must be {what}. Got {shown(found)} instead.", param=name)


def _new_tokens(body: dict[str, Any], limits: Limits) -> int | None:
    """Take the longest answer out of a body. The newer name wins; Transformers before 5.18 knows only the older one."""
    asked = [_number(body, name, 1, limits.new_tokens, whole=True) for name in ("max_completion_tokens", "max_tokens")]
    body.pop("max_completion_tokens", None)
    body.pop("max_tokens", None)
    wanted: int | None = asked[0] if asked[0] is not None else asked[1]
    return wanted


def _check_stop(body: dict[str, Any]) -> None:
    if (stop := body.get("stop")) is None:
        return
    stops = [stop] if isinstance(stop, str) else stop
    _must_be(
        isinstance(stops, list)
        and 0 < len(stops) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops),
        "stop",
        f"a text of 1 to {MAX_STOP_CHARACTERS} characters, or up to {MAX_STOPS} of them",
        stop,
    )


def _check_bias(body: dict[str, Any], limits: Limits) -> None:
    if (bias := body.get("logit_bias")) is None:
        return
    if not isinstance(bias, dict):
        raise Refused(f"'logit_bias' must map token ids to numbers. Got {shown(bias)} instead.", param="logit_bias")
    for token, value in bias.items():
        known = (
            token.isdecimal() and token.isascii() and len(token) < 10 and int(token) < (limits.vocabulary or math.inf)
        )
        if not known:
            raise Refused(f"'logit_bias' names {shown(token)}, which is no token id of the model.", param="logit_bias")
        bias[token] = float(_number({"logit_bias": value}, "logit_bias", -100, 100))  # Transformers takes no int
    if not bias:
        body.pop("logit_bias")


def _check_chat(body: dict[str, Any]) -> None:
    try:
        check_messages(body.get("messages"))
    except ValueError as error:
        raise Refused(str(error), param="messages") from None
    for message in body["messages"]:
        # Clients send an answer back as they got it; with this field, Transformers would leave its text out.
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
    arguments = body.get("chat_template_kwargs", {})
    _must_be(
        isinstance(arguments, dict) and not arguments.keys() & _TEMPLATE_PARAMETERS,
        "chat_template_kwargs",
        "an object of the template's own variables",
        arguments,
    )
