"""Reads all lines of a batch: each has a name that no other has, and a digest of what it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from promoe.commands.batch.lines import LineError, Request, read_request
from promoe.commands.batch.source import Source

# Hexadecimal digits of a digest: enough that two of a billion lines hardly share one.
DIGEST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch.

    Attributes:
        name: its `custom_id`, or a name for a line that has none or shares it with an earlier line.
        digest: digest of what it asks for, including seed and longest answer. A line that was changed has another one.
        request: what it asks for; None: it cannot be answered.
        error: why it cannot; None: it can.
    """

    name: str
    digest: str
    request: Request | None = None
    error: LineError | None = None


def read_batch(source: Source, seed: int, max_tokens: int) -> Iterator[Line]:
    """Yield all lines, in their order.

    Args:
        source: where they come from.
        seed: seed of the whole batch.
        max_tokens: longest answer of lines that do not say it.

    Raises:
        ConfigError: the source cannot be read.
    """
    seen: set[str] = set()
    for number, content in source.lines():
        try:
            request = read_request(number, content, seed)
            _claim(request.custom_id, number, seen)
            yield Line(request.custom_id, _digest_of(request, max_tokens), request)
        except LineError as error:
            yield _unanswerable(error, number, content, seen)


def _claim(name: str, number: int, seen: set[str]) -> None:
    if name in seen:
        raise LineError(f"line-{number}", f"Another line has the 'custom_id' {name!r}, too. Give each line its own.")
    seen.add(name)


def _unanswerable(error: LineError, number: int, content: bytes, seen: set[str]) -> Line:
    """Return a line that cannot be answered, under a name that no other line has."""
    if error.custom_id in seen:
        error = LineError(f"line-{number}", str(error))
    seen.add(error.custom_id)
    return Line(error.custom_id, _digest(content.strip()), error=error)


def _digest_of(request: Request, max_tokens: int) -> str:
    fields = asdict(request)
    fields["max_tokens"] = request.max_tokens or max_tokens
    return _digest(json.dumps(fields, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]
