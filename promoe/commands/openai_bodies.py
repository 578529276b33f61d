"""What requests of OpenAI's interface have in common, to a server or in a file: fields that say nothing, and messages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from promoe.errors import shown
from promoe.files import loads

# Fields that say nothing about the answer's text.
IGNORED = frozenset(
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
# Fields that would change the answer but that nothing here answers, with the values that ask for nothing.
UNSUPPORTED: dict[str, Collection[Any]] = {
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


def asks_for_nothing(value: Any, neutral: Collection[Any]) -> bool:
    """Return whether the value of a field is one of those that ask for nothing. 0.0 is 0, but False is not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def check_messages(messages: Any) -> None:
    """Check the messages of a chat.

    Raises:
        ValueError: they are not what a chat template can be given.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' must be a list that is not empty. Got {shown(messages)} instead.")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"Message {number} must be an object with a 'role'. Got {shown(message)} instead.")
        if not _is_text(message.get("content")):
            raise ValueError(
                f"The content of message {number} must be text, or parts of type text: no pictures, sounds or files are read "
                f"here. Got {shown(message.get('content'))} instead."
            )
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise ValueError(
                f"The 'tool_calls' of message {number} must be a list of objects whose 'function' has a 'name' and "
                f"'arguments'. Got {shown(calls)} instead."
            )


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return checked messages as chat templates take them, and as Transformers' server hands them over.

    Content is one text. Calls of tools have arguments in place of JSON, and no text beside them.

    Raises:
        ValueError: the arguments of a call are not JSON.
    """
    plain = []
    for message in messages:
        calls, content = message.get("tool_calls"), message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(part["text"] for part in content)
        one = {**message, "content": "" if calls else content}
        one.pop("tool_calls", None)
        if calls:
            one["tool_calls"] = [{**call, "function": _with_arguments(call["function"])} for call in calls]
        plain.append(one)
    return plain


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": loads(arguments.encode()) if isinstance(arguments, str) else arguments}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _is_text(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
