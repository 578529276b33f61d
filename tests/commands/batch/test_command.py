"""`promoe batch` on a tiny checkpoint: answers, bad lines, and going on after a stop."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from promoe import cli

LONG = 10**6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def arguments(checkpoint: str, source: Path, out: Path) -> list[str]:
    sizes = ["--at-once", "4", "--step-tokens", "16", "--kv-tokens", "512", "--max-tokens", "6"]
    return ["batch", checkpoint, str(source), "--out", str(out), "--cache", "30%", *sizes]


def answers(path: Path) -> dict[str, Any]:
    """By custom_id; no name may be there twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def texts(path: Path) -> dict[str, Any]:
    return {name: line["error"] or line["response"]["body"]["choices"] for name, line in answers(path).items()}


def requests(count: int) -> list[Any]:
    return [
        {"custom_id": f"r{idx}", "prompt": "a word " * (1 + idx % 5), "max_tokens": 1 + idx % 6, "temperature": idx % 2}
        for idx in range(count)
    ]


def test_every_line_is_answered_or_refused(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "n": 3, "temperature": 1.0, "max_tokens": 4}
    bad = [
        "no json",
        {"prompt": "x", "n": LONG},
        {"prompt": "x", "max_tokens": LONG},
        {"custom_id": "r1", "prompt": "x"},
    ]
    bad.append({"custom_id": "unknown", "prompt": [LONG]})
    source = write_lines(
        tmp_path / "in.jsonl",
        [*requests(8), "", *bad, {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat}],
    )
    out = tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    found = answers(out)
    assert set(found) == {
        *(f"r{idx}" for idx in range(8)),
        "line-10",
        "line-11",
        "line-12",
        "line-13",
        "unknown",
        "chat",
    }
    errors = {name: line["error"]["message"] for name, line in found.items() if line["error"]}
    assert "cannot be read as JSON" in errors["line-10"]
    assert "'n' must be" in errors["line-11"]
    assert "room for 512 tokens" in errors["line-12"]
    assert "'custom_id' 'r1'" in errors["line-13"]
    assert f"token id {LONG}" in errors["unknown"]
    assert len(errors) == 5
    for idx in range(8):
        body = found[f"r{idx}"]["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["usage"]["completion_tokens"] <= 1 + idx % 6
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
    choices = found["chat"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    printed = capsys.readouterr().err
    assert "9 answers and 5 errors written" in printed
    assert "hit rate" in printed


def test_every_line_has_one_answer_whatever_names_lines_share(checkpoint: str, tmp_path: Path) -> None:
    huge = {"custom_id": "huge", "prompt": "x", "max_tokens": 10**400}
    a_line, bad = {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "x", "n": 0}
    lines = [
        huge,
        a_line,
        {**a_line, "n": 0},
        bad,
        {"custom_id": "b", "prompt": "x"},
        {"custom_id": "line-7", "prompt": "x"},
        "bad",
    ]
    source, out = (
        write_lines(tmp_path / "in.jsonl", ["\ufeff" + json.dumps(lines[0]), *lines[1:]]),
        tmp_path / "out.jsonl",
    )
    for _ in range(2):
        assert cli.main(arguments(checkpoint, source, out)) == 0
        found = answers(out)
        assert set(found) == {"huge", "a", "line-3", "b", "line-5", "line-6", "line-7"}
        assert [name for name, line in found.items() if not line["error"]] == ["a"]
    assert cli.main(arguments(checkpoint, source, source)) == 2


def test_the_same_command_answers_what_is_missing(checkpoint: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [*requests(10), "bad"]), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    whole, content = texts(out), out.read_bytes()
    assert cli.main(arguments(checkpoint, source, out)) == 0
    assert out.read_bytes() == content
    lines = content.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[::3]) + lines[1][:40])
    assert cli.main(arguments(checkpoint, source, out)) == 0
    again = texts(out)
    assert set(again) == set(whole)
    kept = [json.loads(line)["custom_id"] for line in lines[::3]]
    assert all(again[name] == whole[name] for name in kept)


def test_files_that_cannot_be_used_are_refused_before_the_model_is_opened(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", requests(1)), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, tmp_path / "none.jsonl", out)) == 2
    assert "prompts cannot be read" in capsys.readouterr().err
    out.write_text("precious")
    assert cli.main(arguments("no-such-model", source, out)) == 2
    assert "is no answer of a batch" in capsys.readouterr().err
    assert out.read_text() == "precious"


def stopped_at_random(command: list[str], out: Path, seed: int, how: signal.Signals) -> int:
    """Run a command until it has written some answers and a moment more. Return its exit code."""
    chance = random.Random(seed)
    wanted, moment_s = chance.randrange(1, 30), chance.random() * 0.2
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if out.is_file() and out.read_bytes().count(b"\n") >= wanted:
            time.sleep(moment_s)
            process.send_signal(how)
            break
        time.sleep(0.005)
    return process.wait(timeout=120)


@pytest.mark.parametrize(
    ("how", "times"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGKILL, 30, marks=pytest.mark.slow),
    ],
)
def test_no_answer_is_lost_doubled_or_torn(how: signal.Signals, times: int, checkpoint: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", requests(60)), tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    assert cli.main(arguments(checkpoint, source, whole)) == 0
    expected = {name: len(line["response"]["body"]["choices"]) for name, line in answers(whole).items()}
    environment = [sys.executable, "-m", "promoe.cli"]
    for seed in range(times):
        out.unlink(missing_ok=True)
        code = stopped_at_random([*environment, *arguments(checkpoint, source, out)], out, seed, how)
        assert code in (-signal.SIGKILL, 130, 0), code
        assert os.path.isfile(out)
        assert cli.main(arguments(checkpoint, source, out)) == 0
        assert {name: len(line["response"]["body"]["choices"]) for name, line in answers(out).items()} == expected


@pytest.mark.slow
def test_memory_stays_flat_over_40000_prompts(checkpoint: str, tmp_path: Path) -> None:
    """Programs of products for each number of rows are made up to 20,000 prompts or so; then only names are added."""
    lines = [{"custom_id": f"r{idx}", "prompt": [1 + idx % 200] * (2 + idx % 7)} for idx in range(40_000)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    sizes = ["--at-once", "64", "--step-tokens", "256", "--kv-tokens", "4096", "--max-tokens", "2", "--cache", "50%"]
    command = [sys.executable, "-m", "promoe.cli", "batch", checkpoint, str(source), "--out", str(out), *sizes]
    found: list[tuple[int, int]] = []  # lines written, RSS in KiB
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(1.0)
            status = Path(f"/proc/{process.pid}/status")
            rss = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")]
            if rss and out.exists():
                found.append((out.read_bytes().count(b"\n"), int(rss[0])))
    assert process.returncode == 0
    assert len(answers(out)) == 40_000
    early = max(rss for count, rss in found if 20_000 <= count <= 25_000)
    late = max(rss for count, rss in found if 35_000 <= count < 40_000)
    assert late - early < 4 * 1024, found
