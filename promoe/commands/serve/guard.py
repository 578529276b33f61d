"""What stands before Transformers' application: it says who may ask, how much, and what happens when they leave."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from promoe.commands.serve.app import HEALTH, error_body
from promoe.commands.serve.bodies import read_requests
from promoe.commands.serve.requests import CHAT, COMPLETION, Asked, Limits, Refused, is_loopback
from promoe.commands.serve.turns import ASKED, ENDING, Turns
from promoe.files import loads
from promoe.units import format_memory, format_seconds

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_STREAM_ERROR = b'data: {"error": '
_STREAM_END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AccessRules:
    """The rules of who may come in.

    Attributes:
        api_key: the key that a client has to show, without the white space around it, which headers lose; None: none.
        local_names_only: refuse what was addressed to another name than this machine's own. A web page can make its own name
            lead here.
    """

    api_key: str | None = None
    local_names_only: bool = True

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise Refused if a request may not come in."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.local_names_only and not _is_local(host):
            raise Refused(f"This server answers to localhost alone. It was addressed as {host[:200]!r}.", 403)
        if self.api_key is None or path == HEALTH:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.api_key.strip().encode()):
            raise Refused(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.", 401, code="invalid_api_key"
            )


class Guard:
    """An ASGI application around another: it lets requests in, cancels those that nobody waits for, and mends streams.

    Args:
        app: Transformers' application.
        turns: the turns that requests take.
        limits: what one request may ask for.
        access: who may come in.
        log: called with a line for each request, when it is over or refused.
    """

    def __init__(
        self, app: App, turns: Turns, limits: Limits, access: AccessRules, log: Callable[[str], None] | None = None
    ) -> None:
        self._app = app
        self._turns = turns
        self._limits = limits
        self._access = access
        self._log = log or (lambda line: print(line, file=sys.stderr, flush=True))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or pass on the server's beginning and end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        try:
            self._access.check(path, headers)
            if scope["method"] != "POST" or path not in (CHAT, COMPLETION):
                await self._app(scope, receive, send)
                return
            body = await _read(receive, headers, self._limits.body_bytes)
            requests = read_requests(path, body, self._limits)
            if len(requests) == 1:
                await self._take_turn(*requests[0], scope, receive, send)
            else:
                await self._answer_all(requests, scope, receive, send)
        except Refused as refused:
            self._turns.tally["refused"] += 1
            self._log(_refusal(path, refused))
            await _refuse(refused, send)
        except _ClientGone:
            pass

    async def _take_turn(self, asked: Asked, body: bytes, scope: Message, receive: Receive, send: Send) -> None:
        with self._turns.taking(asked):
            started_s = time.perf_counter()
            await self._answer(asked, body, scope, receive, send)
        self._log(_line(asked, time.perf_counter() - started_s))

    async def _answer_all(
        self, requests: list[tuple[Asked, bytes]], scope: Message, receive: Receive, send: Send
    ) -> None:
        """Answer several prompts of one request, one after the other, with one response. An error of one is that of all."""
        answers: list[dict[str, Any]] = []
        for asked, body in requests:
            kept: list[Message] = []

            async def keep(message: Message, kept: list[Message] = kept) -> None:
                kept.append(message)

            await self._take_turn(asked, body, scope, receive, keep)
            if asked.outcome != "answered" or kept[0]["status"] != 200:
                for message in kept:
                    await send(message)
                return
            answers.append(loads(b"".join(message.get("body", b"") for message in kept)))
        await _send_json(send, 200, _joined(answers))

    async def _answer(self, asked: Asked, body: bytes, scope: Message, receive: Receive, send: Send) -> None:
        """Run the application on a request until it is done or the client is gone, whichever comes first."""
        ASKED.set(asked)
        length = (b"content-length", str(len(body)).encode())
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
        gone = asyncio.ensure_future(_until_gone(receive))
        cancelled, loop = asyncio.Event(), asyncio.get_running_loop()
        asked.on_cancel = lambda: loop.call_soon_threadsafe(cancelled.set)
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if parts:
                return parts.pop()
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        mended = _MendedSend(asked, send)
        answer = asyncio.ensure_future(self._app({**scope, "headers": [*headers, length]}, replay, mended))
        ending = asyncio.ensure_future(cancelled.wait())
        try:
            await asyncio.wait({answer, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the server gives up waiting
            if not answer.done() and not mended.over:  # a client may well leave once it has its answer
                asked.cancel()
                answer.cancel()
            gone.cancel()
            ending.cancel()
        error, *_ = await asyncio.gather(answer, gone, ending, return_exceptions=True)
        if asked.cancelled:
            await mended.cut_off()
        elif isinstance(error, Exception) and asked.error is None:
            asked.error = type(error).__name__
            logger.error("A request for %s failed", asked.path, exc_info=error)


class _ClientGone(Exception):
    """Raised when the client left before it had asked."""


class _MendedSend:
    """A `send` that adds to streams what Transformers' server lacks: errors in OpenAI's form, and the end of the stream.

    Attributes:
        over: whether all of the response was sent.
    """

    def __init__(self, asked: Asked, send: Send) -> None:
        self._asked = asked
        self._send = send
        self._streams = False
        self._begun = False
        self.over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._streams = any(value.startswith(b"text/event-stream") for value in types)
            if 400 <= message["status"] < 500:
                self._asked.refusal = f"refused with status {message['status']}"
        elif message["type"] == "http.response.body":
            self.over = not message.get("more_body", False)
            if self._streams:
                message = {**message, "body": self._mended(message.get("body", b""))}
        await self._send(message)

    async def cut_off(self) -> None:
        """End a response that was cancelled, for a client that may still be there."""
        if not self._begun:
            await _refuse(Refused(ENDING, 503, code="overloaded"), self._send)
        elif self._streams and not self.over:
            self.over = True
            await self._send({"type": "http.response.body", "body": _event(error_body(ENDING, 503)) + _STREAM_END})

    def _mended(self, body: bytes) -> bytes:
        start = body.rfind(_STREAM_ERROR)
        if start >= 0 and self._asked.error is not None:
            body = body[:start] + _event(error_body(self._asked.error, 500))
        return body + _STREAM_END if self.over else body


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _read(receive: Receive, headers: dict[bytes, bytes], most_bytes: int) -> bytes:
    """Return the body of a request, if it is JSON and not too long; nothing is kept of a longer one."""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":  # which a form on a web page cannot send here
        raise Refused("The request's content type must be application/json.", 415)
    too_long = Refused(f"The request's body is longer than {format_memory(most_bytes)}.", 413)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > most_bytes:
        raise too_long
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most_bytes:
            raise too_long
    return bytes(body)


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Join answers to one prompt each: choices are numbered in the order of the prompts, tokens are added up."""
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    usage = {name: sum(answer["usage"][name] for answer in answers) for name in answers[0]["usage"]}
    return {**answers[0], "choices": choices, "usage": usage}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(refused: Refused, send: Send) -> None:
    headers = []
    if refused.status in (413, 415):
        headers.append((b"connection", b"close"))  # what is left of the body is not read
    if refused.status == 503:
        headers.append((b"retry-after", b"1"))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    error = error_body(str(refused), refused.status, refused.param, refused.code)
    await _send_json(send, refused.status, error, headers)


async def _send_json(
    send: Send, status: int, value: dict[str, Any], more_headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole response."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_local(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # brackets that do not match
        return False


def _refusal(path: str, refused: Refused) -> str:
    """Return one line for the log, whatever the client wrote."""
    line = f"{path.removeprefix('/v1/')[:100]}: refused with status {refused.status}: {str(refused)[:300]}"
    return "".join(character if character.isprintable() else "?" for character in line)


def _line(asked: Asked, seconds: float) -> str:
    outcome = asked.error or asked.refusal or asked.outcome
    kind = asked.path.removeprefix("/v1/")
    return f"{kind}: {asked.prompt_tokens} + {asked.passes} tokens in {format_seconds(seconds)}, {outcome}"
