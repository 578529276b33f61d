from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from promoe.commands.serve.guard import AccessRules, _refusal
from promoe.commands.serve.requests import CHAT, Refused

from .support import KEY, MESSAGES, Served, serving

LOCAL = {b"host": b"127.0.0.1:8000"}


def with_key(value: bytes) -> dict[bytes, bytes]:
    return {**LOCAL, b"authorization": value}


@pytest.mark.parametrize("value", [b"Bearer secret", b"bearer secret", b"Bearer  secret "])
def test_the_right_key_opens(value: bytes) -> None:
    AccessRules("secret").check(CHAT, with_key(value))


@pytest.mark.parametrize("key", [" secret", "secret\n"])
def test_white_space_around_a_key_is_not_asked_for(key: str) -> None:
    AccessRules(key).check(CHAT, with_key(b"Bearer secret"))
    with pytest.raises(Refused):
        AccessRules(key).check(CHAT, with_key(b"Bearer "))


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer secre", b"Basic secret", b"secret", b"Bearer \xff\xfe"],
)
def test_other_keys_do_not(value: bytes) -> None:
    with pytest.raises(Refused, match="missing or wrong") as refused:
        AccessRules("secret").check(CHAT, with_key(value))
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_health_needs_no_key_and_without_one_nothing_does() -> None:
    AccessRules("secret").check("/health", LOCAL)
    AccessRules().check(CHAT, LOCAL)


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:80", "127.1.2.3", "[::1]:80", "a.localhost"])
def test_names_of_this_machine(host: str) -> None:
    AccessRules().check(CHAT, {b"host": host.encode()})


@pytest.mark.parametrize(
    "host", ["", "example.com", "example.com:80", "localhost.example.com", "10.0.0.1", "[::1", "a b"]
)
def test_other_names_lead_nowhere_unless_others_are_wanted(host: str) -> None:
    with pytest.raises(Refused, match="answers to localhost alone") as refused:
        AccessRules().check(CHAT, {b"host": host.encode()})
    assert refused.value.status == 403
    AccessRules(local_names_only=False).check(CHAT, {b"host": host.encode()})


def test_who_is_refused_gets_openais_form_of_it(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    question = json.dumps({"messages": MESSAGES, "max_tokens": 1})
    cases = [
        (served.post(question, key="wrong"), 401, "API key is missing or wrong"),
        (served.post(question, key=None), 401, "API key is missing or wrong"),
        (served.get("/promoe/report", key=None), 401, "API key is missing or wrong"),
        (served.get("/v1/models", host="example.com"), 403, "answers to localhost alone"),
        (served.post(question, **{"content-type": "text/plain"}), 415, "must be application/json"),
        (served.post("{"), 400, "The body cannot be read as JSON"),
        (served.get(CHAT), 405, "Method Not Allowed"),
    ]
    for (status, body), expected, match in cases:
        error = json.loads(body)["error"]
        assert status == expected
        assert match in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}
    log = capfd.readouterr().err
    assert log.count("chat/completions: refused with status 401: The API key is missing or wrong.") == 2
    assert "/promoe/report: refused with status 401" in log
    assert "models: refused with status 403: This server answers to localhost alone. It was addressed as" in log
    assert "chat/completions: refused with status 400: The body cannot be read as JSON" in log
    assert served.post(question)[0] == 200
    assert served.asked[0].outcome == "answered"


def test_a_line_of_the_log_is_one_line() -> None:
    found = _refusal("/v1/a\nb\x1b[2J" + "c" * 1000, Refused("no\r\n" + "d" * 1000, 400))
    assert found.startswith("a?b?[2Jccc")
    assert ": refused with status 400: no??ddd" in found
    assert len(found) < 500


def test_a_long_body_is_refused_before_it_has_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    with serving(folder, monkeypatch, max_body="1KiB") as served:
        for rest in ("Content-Length: 1000000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n401\r\n" + "x" * 0x401):
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
                connection.sendall((head + rest).encode())
                answer = connection.makefile("rb").read()  # until the server closes it
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"longer than 1.0 KiB" in answer
        assert not served.asked


def test_who_leaves_before_asking_is_forgotten(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        connection.sendall((head + "Content-Length: 100\r\n\r\n{").encode())
    assert served.chat(1).usage.completion_tokens == 1
    assert len(served.asked) == 1
