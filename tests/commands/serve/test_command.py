from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from waiting import WAIT_S

from promoe import cli
from promoe.commands.serve import command
from promoe.commands.serve.command import run_serve
from promoe.commands.serve.options import Options
from promoe.errors import ConfigError, UnsupportedModelError

from .support import KEY, MESSAGES


class Told(io.StringIO):
    """What the command says, for another thread that waits for the first line."""

    def __init__(self) -> None:
        super().__init__()
        self.line: Future[str] = Future()

    def write(self, text: str) -> int:
        if not self.line.done():
            self.line.set_result(text)
        return super().write(text)


def ask_and_interrupt(line: str, act: Callable[[], None]) -> str:
    """Read the beginning of a stream, `act`, and say what the rest of the stream says; `act` in any case."""
    try:
        return _ask_and(line, act)
    except BaseException:
        act()  # or whoever serves would serve for ever
        raise


def _ask_and(line: str, act: Callable[[], None]) -> str:
    assert line.startswith("Serving tiny at http://127.0.0.1:"), line
    with openai.OpenAI(base_url=line.split()[3], api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1000, "temperature": 0, "stream": True}
        stream = client.chat.completions.create(**asked)
        assert all(next(stream).choices for _ in range(3))
        act()
        with pytest.raises(openai.APIError) as told:
            list(stream)
        return str(told.value)


@pytest.mark.usefixtures("_heeding_ctrl_c")
def test_ctrl_c_in_the_midst_of_an_answer_ends_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Told()
    ident = threading.main_thread().ident
    assert ident is not None
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(
            lambda: ask_and_interrupt(out.line.result(WAIT_S), lambda: signal.pthread_kill(ident, signal.SIGINT))
        )
        run_serve(Options(str(folder), cache="25%", port=0, name="tiny", api_key=KEY), out)
        assert "The server is ending" in told.result(WAIT_S)
    assert "/promoe/stats" in out.getvalue()
    err = capsys.readouterr().err
    assert "chat/completions: 23 + " in err
    assert ", cancelled\n" in err
    assert "6 slots for 24 experts" in err, "the report at the end"
    assert "promoe-server" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("_heeding_ctrl_c")
def test_what_a_run_used_is_fetched_before_the_first_request(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(folder), "tell me", "--max-new-tokens", "4", "--report", str(tmp_path / "r.html")]) == 0
    capsys.readouterr()
    out = Told()
    found: dict[str, Any] = {}
    ident = threading.main_thread().ident
    assert ident is not None

    def look(line: str) -> None:
        address = line.split()[3].removesuffix("/v1")
        request = urllib.request.Request(f"{address}/promoe/stats", headers={"Authorization": f"Bearer {KEY}"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                found.update(json.load(response)["stats"])
        finally:  # or whoever serves would serve for ever
            signal.pthread_kill(ident, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: look(out.line.result(WAIT_S)))
        run_serve(Options(str(folder), cache="50%", port=0, api_key=KEY, warm=str(tmp_path / "r.json")), out)
        done.result(WAIT_S)
    assert found["total"]["layer_visits"] == 0
    assert found["total"]["bytes_demand"] == 12 * found["expert_bytes"][0]
    assert "warmed: 12 experts" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_is_told_before_the_model_is_opened(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read 'nowhere\.json'"):
        run_serve(Options(str(folder), port=0, warm="nowhere.json"), io.StringIO())


@pytest.mark.slow
@pytest.mark.usefixtures("_heeding_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_serves_until_it_is_interrupted(folder: Path, number: signal.Signals) -> None:
    arguments = [sys.executable, "-m", "promoe.cli", "serve", str(folder), "--port", "0", "--name", "tiny"]
    environment = {**os.environ, "PROMOE_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        killer = threading.Timer(WAIT_S, process.kill)  # so that a hang is a failure
        killer.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "/promoe/stats" in process.stdout.readline()
            told = ask_and_interrupt(line, lambda: process.send_signal(number))
            _, err = process.communicate(timeout=WAIT_S)
        finally:
            killer.cancel()
            process.kill()
    assert "The server is ending" in told
    assert process.returncode == 0, err
    assert "12 slots for 24 experts" in err
    assert "Traceback" not in err


def test_sigterm_is_an_interruption_while_it_serves() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), command._terminated_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"port": 65536}, "--port must be from 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens must be at least 1"),
        ({"max_waiting": 0}, "--max-waiting must be at least 1"),
        ({"max_body": "much"}, "--max-body"),
        ({"api_key": " "}, "The API key must be"),
        ({"api_key": "schlüssel"}, "The API key must be"),
        ({"cache": "much"}, "cache"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Options("model", **options)


@pytest.mark.parametrize(
    ("encoder_decoder", "tokenizer", "match"),
    [
        (True, SimpleNamespace(_tokenizer=0), "an encoder and a decoder"),
        (False, SimpleNamespace(), "no fast tokenizer"),
    ],
)
def test_models_that_transformers_server_cannot_serve(encoder_decoder: bool, tokenizer: Any, match: str) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=encoder_decoder))
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UnsupportedModelError, match=match):
        command.serve(model, tokenizer, Options("m"), listener, lambda address: None)


def test_an_address_that_cannot_be_had_is_told_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr(command, "from_pretrained", opened)
    monkeypatch.setattr(command, "load_tokenizer", opened)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "model", "--port", str(port)]) == 2
    assert f"Cannot listen at 127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err
    assert cli.main(["serve", "model", "--host", "256.0.0.1", "--port", "0"]) == 2
    assert "Cannot listen at 256.0.0.1" in capsys.readouterr().err


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_serve_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'promoe\[serve\]'"):
        run_serve(Options("model"), io.StringIO())


def test_who_else_can_reach_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    address = command.Address("http://0.0.0.0:80", lambda: None)
    out = io.StringIO()
    command._say(address, Options("m", host="0.0.0.0"), out)
    assert out.getvalue().startswith("Serving m at http://0.0.0.0:80/v1 (no API key)")
    assert "Everyone who reaches this address" in capsys.readouterr().err
    for quiet in (Options("m"), Options("m", host="0.0.0.0", api_key="k"), Options("m", host="::1")):
        command._say(address, quiet, io.StringIO())
    assert capsys.readouterr().err == ""
