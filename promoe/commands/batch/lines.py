"""Reads lines of a batch file: each is checked by itself, and refused in words that say what to change."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from promoe.commands.openai_bodies import IGNORED, UNSUPPORTED, asks_for_nothing, check_messages, plain_messages
from promoe.errors import PromoeError, shown
from promoe.files import loads, open_plain, values_of
from promoe.runtime.sampling import Sampling

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_LINE_BYTES = 32 * 2**20
MAX_CHOICES = 128
MAX_ID_CHARACTERS = 512
# Fields of a line beside its body.
_ENVELOPE = ("custom_id", "method", "url", "body")
# Fields that say nothing about the answer: it is this command's model that answers.
_IGNORED = IGNORED | {"model"}
# Fields that would change the answer, with the values that ask for nothing.
_UNSUPPORTED: dict[str, Collection[Any]] = {
    **UNSUPPORTED,
    "stream": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
}
_OWN = {CHAT: "messages", COMPLETION: "prompt"}
# The names of lines without a custom_id.
_UNNAMED = re.compile(r"line-\d+")
_LENGTHS = ("max_completion_tokens", "max_tokens")
_NUMBERS = (*_LENGTHS, "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n")


@dataclass(frozen=True, slots=True)
class Request:
    """What a line asks for.

    Attributes:
        custom_id: the line's name, which its answer has, too.
        url: CHAT or COMPLETION.
        content: a list of messages (CHAT), or a text or token ids (COMPLETION).
        max_tokens: longest answer, in tokens; None: it was not said.
        choices: number of answers.
        stops: texts that end an answer, and are not in it.
        sampling: how the tokens of the first choice are drawn; the others have other seeds.
    """

    custom_id: str
    url: str
    content: Any
    max_tokens: int | None
    choices: int
    stops: tuple[str, ...]
    sampling: Sampling


class LineError(PromoeError):
    """Raised for a line that is not answered; `custom_id` is the line's name."""

    def __init__(self, custom_id: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, and their numbers from 1 on. A longer line than allowed is cut."""
    with open(open_plain(path), "rb") as file:
        for number, line in enumerate(_lines(file), 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield number, line


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line


def read_request(number: int, line: bytes, seed: int) -> Request:
    """Return what a line asks for.

    Args:
        number: number of the line, from 1 on.
        line: one JSON object.
        seed: seed of the whole file.

    Raises:
        LineError: it cannot be read, or asks for an unsupported feature.
    """
    unnamed = f"line-{number}"
    if len(line) > MAX_LINE_BYTES:
        raise LineError(unnamed, f"The line has more than {MAX_LINE_BYTES >> 20} MiB. Split it.")
    try:
        value = loads(line, constants=False)
    except ValueError as error:
        raise LineError(_name_in(line, unnamed), f"The line cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise LineError(unnamed, f"The line must be a JSON object. Got {shown(value)} instead.")
    custom_id = value.get("custom_id", unnamed)
    if not _is_name(custom_id):
        raise LineError(
            unnamed, f"'custom_id' must be a text of 1 to {MAX_ID_CHARACTERS} characters. Got {shown(custom_id)}."
        )
    if _UNNAMED.fullmatch(custom_id) and custom_id != unnamed:
        raise LineError(unnamed, f"The 'custom_id' {custom_id!r} is the name of another line. Choose another one.")
    try:
        return _request(custom_id, value, seed)
    except ValueError as error:
        raise LineError(custom_id, str(error)) from None


def _is_name(custom_id: Any) -> bool:
    return isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARACTERS


def _name_in(line: bytes, unnamed: str) -> str:
    """Return the `custom_id` of a line that cannot be answered, where it can be told."""
    try:
        (name,) = values_of(line, "custom_id")  # a line with two says none
        name.encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return unnamed
    return name if _is_name(name) and not _UNNAMED.fullmatch(name) else unnamed


def _request(custom_id: str, value: dict[str, Any], seed: int) -> Request:
    url, body = _body(value)
    body = {name: field for name, field in body.items() if field is not None and name not in _IGNORED}
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    content = _content(url, body.pop(_OWN[url], None))
    for name in sorted(body.keys() & _UNSUPPORTED.keys()):
        found = body.pop(name)
        if not asks_for_nothing(found, _UNSUPPORTED[name]):
            raise ValueError(f"'{name}' is not supported. Got {shown(found)}. Leave it out.")
    stops = _stops(body.pop("stop", ()))
    if unknown := sorted(body.keys() - set(_NUMBERS)):
        raise ValueError(f"There is no field {shown(unknown[0])} for {url}. Leave it out.")
    longest = [_number(body, name, 1, 2**31, whole=True) for name in _LENGTHS]
    choices = _number(body, "n", 1, MAX_CHOICES, whole=True) or 1
    sampling = _sampling(custom_id, body, seed, choices)
    return Request(custom_id, url, content, longest[0] or longest[1], choices, stops, sampling)


def _sampling(custom_id: str, body: dict[str, Any], seed: int, choices: int) -> Sampling:
    own_seed = _number(body, "seed", -(2**63), 2**63 - 1, whole=True)
    temperature = _number(body, "temperature", 0, 2)
    top_k = _number(body, "top_k", -1, 2**31, whole=True)
    return Sampling(
        temperature=temperature,
        top_p=_number(body, "top_p", 0, 1),
        top_k=None if top_k is None else max(0, top_k),  # -1 is other servers' word for all tokens
        seed=zlib.crc32(custom_id.encode(), seed & 0xFFFFFFFF) if own_seed is None else own_seed,
        min_p=_number(body, "min_p", 0, 1),
        repetition_penalty=_number(body, "repetition_penalty", 0.01, 10),
        do_sample=True if choices > 1 and temperature is None else None,
    )


def _body(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "body" not in value:
        body = {name: field for name, field in value.items() if name not in _ENVELOPE}
        return (CHAT if "messages" in body else COMPLETION), body
    if unknown := sorted(value.keys() - set(_ENVELOPE)):
        raise ValueError(f"There is no field {shown(unknown[0])} beside 'body'. Leave it out.")
    if value.get("method", "POST") != "POST":
        raise ValueError(f"'method' must be 'POST'. Got {shown(value['method'])} instead.")
    url, body = value.get("url", CHAT), value["body"]
    if url not in (CHAT, COMPLETION):
        raise ValueError(f"'url' must be {CHAT} or {COMPLETION}. Got {shown(url)} instead.")
    if not isinstance(body, dict):
        raise ValueError(f"'body' must be an object. Got {shown(body)} instead.")
    return url, body


def _content(url: str, content: Any) -> Any:
    """Return the checked prompt: token ids or a text as they are, messages as chat templates take them."""
    if url == CHAT:
        check_messages(content)
        return plain_messages(content)
    ids = isinstance(content, list) and all(type(token) is int and 0 <= token < 2**31 for token in content)
    if not content or not (isinstance(content, str) or ids):
        raise ValueError(
            f"'prompt' must be a text or a list of token ids, and not empty. Got {shown(content)} instead."
        )
    return content


def _stops(stops: Any) -> tuple[str, ...]:
    found = [stops] if isinstance(stops, str) else stops
    if not isinstance(found, (list, tuple)) or len(found) > 4 or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"'stop' must be a text, or up to 4 of them. Got {shown(stops)} instead.")
    return tuple(found)


def _number(body: dict[str, Any], name: str, least: float, most: float, whole: bool = False) -> Any:
    """Return the number of a field; None: it is not there."""
    if name not in body:
        return None
    value = body[name]
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"'{name}' must be {kind} from {least} to {most}. Got {shown(value)} instead.")
    return value
