"""`promoe batch` on a tiny checkpoint: answers, bad lines, and going on after a stop."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from promoe import cli
from promoe.commands.batch import answering
from promoe.model.tokenizer import load_tokenizer

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
    assert "The model's context is 512 tokens" in errors["line-12"]
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


def changed(lines: list[Any], number: int, **fields: Any) -> list[Any]:
    return [{**line, **fields} if idx == number else line for idx, line in enumerate(lines)]


def test_answers_of_another_model_are_not_gone_on_with(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", requests(8)), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:4]))
    half = out.read_bytes()
    other = write_checkpoint(tmp_path / "other", seed=5)
    assert cli.main(arguments(str(other), source, out)) == 2
    assert "has answers of another model" in capsys.readouterr().err
    assert cli.main([*arguments(checkpoint, source, out), "--kernels", "fast"]) == 2
    assert out.read_bytes() == half
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert cli.main(arguments(str(copy), source, out)) == 0
    found = answers(out)
    assert len(found) == 8
    bodies = [line["response"]["body"] for line in found.values()]
    assert {body["model"] for body in bodies} == {checkpoint, str(copy)}
    assert len({body["system_fingerprint"] for body in bodies}) == 1


@pytest.mark.parametrize(
    ("fields", "more"),
    [({"prompt": "b"}, []), ({"max_tokens": 5}, []), ({"temperature": 0.5}, []), ({}, ["--seed", "1"])],
)
def test_a_changed_line_is_not_given_its_old_answer(
    fields: dict[str, Any], more: list[str], checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = requests(6)
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    before = out.read_bytes()
    write_lines(source, changed(lines, 1, **fields))
    assert cli.main([*arguments(checkpoint, source, out), *more]) == 2
    assert "lines that ask for something else now (r" in capsys.readouterr().err
    assert out.read_bytes() == before
    if not more:
        out.write_bytes(b"".join(line for line in before.splitlines(keepends=True) if b'"custom_id": "r1"' not in line))
        assert cli.main(arguments(checkpoint, source, out)) == 0
        assert set(answers(out)) == {f"r{idx}" for idx in range(6)}


def test_lines_without_names_are_not_known_by_their_number(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": f"word {idx}"} for idx in range(5)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    write_lines(source, [*lines, {"prompt": "appended"}])
    assert cli.main(arguments(checkpoint, source, out)) == 0
    assert set(answers(out)) == {f"line-{number}" for number in range(1, 7)}
    before = out.read_bytes()
    write_lines(source, [lines[0], {"prompt": "inserted"}, *lines[1:]])
    assert cli.main(arguments(checkpoint, source, out)) == 2
    assert "(line-2, line-3, line-4, line-5, line-6)" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_stop_ends_computing_and_may_be_a_special_token(checkpoint: str, tmp_path: Path) -> None:
    plain = [{"custom_id": f"p{idx}", "prompt": f"{idx}", "max_tokens": 40, "temperature": 1.0} for idx in range(4)]
    source, out = write_lines(tmp_path / "plain.jsonl", plain), tmp_path / "plain.out"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    tokenizer = load_tokenizer(checkpoint)
    stopped, expected = [], {}
    for name, line in answers(out).items():
        body = line["response"]["body"]
        text = body["choices"][0]["text"]
        assert len(text) > 4
        stop = text[3:5]
        place = text.index(stop)
        stopped.append({**next(one for one in plain if one["custom_id"] == name), "stop": [stop, "<|human|>"]})
        expected[name] = text[:place], len(tokenizer(text[:place] + stop)["input_ids"])
    source, out = write_lines(tmp_path / "stopped.jsonl", stopped), tmp_path / "stopped.out"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    for name, line in answers(out).items():
        body = line["response"]["body"]
        text, count = expected[name]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["text"] in (text, text.split("<|human|>")[0])
        assert body["usage"]["completion_tokens"] <= count


def test_lines_that_need_a_larger_kv_cache_are_answered_last(checkpoint: str, tmp_path: Path) -> None:
    lines: list[Any] = requests(6)
    lines[1:1] = [
        {"custom_id": "long", "prompt": "x" * 150, "max_tokens": 6},
        {"custom_id": "longer", "prompt": "y" * 200},
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    few = [*arguments(checkpoint, source, out), "--kv-tokens", "64"]
    assert cli.main(few) == 0
    found = answers(out)
    assert set(list(found)[-2:]) == {"long", "longer"}
    assert all(line["error"] is None for line in found.values())
    many = tmp_path / "many.jsonl"
    assert cli.main(arguments(checkpoint, source, many)) == 0
    assert texts(many) == texts(out)


def test_a_kv_cache_that_does_not_fit_into_the_memory_is_an_error_of_its_line(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "free_ram_bytes", lambda: 2**10)
    lines = [*requests(3), {"custom_id": "long", "prompt": "x" * 150}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main([*arguments(checkpoint, source, out), "--kv-tokens", "64"]) == 0
    found = answers(out)
    assert "need a KV cache of 160 tokens" in found["long"]["error"]["message"]
    assert sum(line["error"] is None for line in found.values()) == 3


def test_an_answer_that_is_not_asked_for_a_length_fits_the_context(tmp_path: Path) -> None:
    checkpoint = str(write_checkpoint(tmp_path / "checkpoint", max_position_embeddings=256))
    lines = [{"custom_id": "clipped", "prompt": "x" * 254}, {"custom_id": "full", "prompt": "x" * 256}]
    lines.append({"custom_id": "asked", "prompt": "x" * 254, "max_tokens": 3})  # type: ignore[dict-item]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    found = answers(out)
    assert found["clipped"]["response"]["body"]["usage"]["completion_tokens"] <= 2
    assert found["full"]["error"]["message"] == "The model's context is 256 tokens. The prompt has 256. Shorten it."
    assert "an answer of 3 was asked for" in found["asked"]["error"]["message"]


def test_several_choices_differ_unless_the_temperature_is_0(checkpoint: str, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"t{idx}", "prompt": "a", "n": 4, **fields} for idx, fields in enumerate(({}, {"temperature": 0}))
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(arguments(checkpoint, source, out)) == 0
    found = {name: {choice["text"] for choice in choices} for name, choices in texts(out).items()}
    assert len(found["t0"]) == 4
    assert len(found["t1"]) == 1


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
