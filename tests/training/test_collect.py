"""The command `promoe-train collect`, on a tiny checkpoint: what it records, says and refuses, and being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint
from tiny_models import build
from transformers import GenerationMixin
from waiting import until

from promoe.training import cli
from promoe.training import collect as collect_module
from promoe.training.recorded_traces import RecordedTrace, TraceWriter
from promoe.training.trace_folder import INFO_FILE, part_paths

from .recordings import assert_same_rows

OPTIONS = ["--batch-size", "3", "--max-prompt-tokens", "24", "--temperature", "1.0", "--dtype", "float32"]
QUESTIONS = [f"Question {number}: {'how ' * (number % 4)}is it?" for number in range(60)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and data, read only."""
    folder = tmp_path_factory.mktemp("shared")
    write_checkpoint(folder / "checkpoint")
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def command(shared: Path) -> Callable[..., list[str]]:
    """The command line that records into a folder."""

    def command_of(out: Path, *more: str, tokens: int = 200) -> list[str]:
        paths = ["--model", str(shared / "checkpoint"), "--data", str(shared / "data.jsonl"), "--out", str(out)]
        return ["collect", *paths, "--max-tokens", str(tokens), *OPTIONS, *more]

    return command_of


Command = Callable[..., list[str]]
Capture = pytest.CaptureFixture[str]


# -- recording --------------------------------------------------------------------------------------------------


def test_it_says_how_large_the_trace_will_be_and_what_it_holds(
    command: Command, tmp_path: Path, capsys: Capture
) -> None:
    assert cli.main(command(tmp_path)) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith(f"200 tokens of 516 B = 100.8 KiB into {tmp_path} (")
    assert before.endswith(" free)")
    trace = RecordedTrace(tmp_path)
    assert after.startswith(f"{trace.num_tokens} tokens (")
    assert after.endswith(f"generated) in {tmp_path}")
    assert 200 <= trace.num_tokens < 200 + 3 * 48
    assert trace.prompts.tolist() == list(range(len(trace.prompts)))
    assert trace.info.settings["dtype"] == "float32"
    assert len(trace.gates) == trace.info.num_layers == 3
    assert trace.gates[0]["weight"].dtype == torch.float32


def test_the_same_command_again_has_nothing_to_do_and_a_larger_one_goes_on(
    command: Command, tmp_path: Path, capsys: Capture
) -> None:
    assert cli.main(command(tmp_path / "a")) == 0
    num_tokens = RecordedTrace(tmp_path / "a").num_tokens
    capsys.readouterr()
    assert cli.main(command(tmp_path / "a")) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"going on after the {num_tokens} tokens that are there"
    assert len(part_paths(tmp_path / "a")) == 1
    assert cli.main(command(tmp_path / "a", tokens=400)) == 0
    assert cli.main(command(tmp_path / "b", tokens=400)) == 0
    assert_same_rows(tmp_path / "a", tmp_path / "b")


def test_experts_on_disk_give_the_same_rows(command: Command, tmp_path: Path) -> None:
    assert cli.main(command(tmp_path / "wanted")) == 0
    assert cli.main(command(tmp_path / "found", "--cache", "50%")) == 0
    assert_same_rows(tmp_path / "found", tmp_path / "wanted")
    assert cli.main(command(tmp_path / "wanted", "--cache", "100%", tokens=300)) == 0  # and may go on with them


def test_a_served_model_is_closed_also_after_an_error(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(collect_module, "record", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(command(tmp_path, "--cache", "50%"))  # no thread of promoe's is left: see conftest


def test_the_checkpoints_dtype(shared: Path, tmp_path: Path) -> None:
    data = ["--data", str(shared / "data.jsonl"), "--max-tokens", "1", "--batch-size", "1"]
    assert cli.main(["collect", "--model", str(shared / "checkpoint"), *data, "--out", str(tmp_path)]) == 0
    trace = RecordedTrace(tmp_path)
    assert trace.gates[0]["weight"].dtype == torch.bfloat16
    assert trace.info.settings["dtype"] == "auto"


def test_prompts_can_be_excluded(command: Command, tmp_path: Path, capsys: Capture) -> None:
    excluded = tmp_path / "excluded.json"
    excluded.write_text(json.dumps([QUESTIONS[0], QUESTIONS[2]]))
    assert cli.main(command(tmp_path / "trace", "--exclude", str(excluded))) == 0
    assert RecordedTrace(tmp_path / "trace").prompts.tolist()[:3] == [1, 3, 4]
    excluded.write_text(json.dumps([QUESTIONS[0], QUESTIONS[1]]))
    assert cli.main(command(tmp_path / "trace", "--exclude", str(excluded))) == 2
    assert "holds a trace with excluded = '2 prompts, sha256" in capsys.readouterr().err


def test_two_shards_in_one_folder(command: Command, tmp_path: Path) -> None:
    for shard_index in ("1", "0"):
        assert cli.main(command(tmp_path, "--num-shards", "2", "--shard-index", shard_index)) == 0
    trace = RecordedTrace(tmp_path)
    assert {path.name for path in part_paths(tmp_path)} == {"part-00000-00000.arrow", "part-00001-00000.arrow"}
    split = int((trace.prompts % 2 == 0).sum())
    assert trace.prompts.tolist() == [*range(0, 2 * split, 2), *range(1, 2 * (len(trace.prompts) - split), 2)]


# -- interruptions ----------------------------------------------------------------------------------------------


def test_ctrl_c(command: Command, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = GenerationMixin.generate, iter(range(99))

    def interrupted(self: GenerationMixin, **arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", interrupted)
        assert cli.main(command(tmp_path / "a", tokens=400)) == 130
    assert "promoe-train collect: interrupted" in capsys.readouterr().err
    assert RecordedTrace(tmp_path / "a").prompts.tolist() == list(range(6))
    assert cli.main(command(tmp_path / "a", tokens=400)) == 0
    assert cli.main(command(tmp_path / "b", tokens=400)) == 0
    assert_same_rows(tmp_path / "a", tmp_path / "b")


def test_a_killed_run_goes_on_without_loss_or_duplication(
    command: Command, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch becomes a part, and the process is killed after two of them, whatever it is doing."""
    small_parts = "collect.TraceWriter = partial(TraceWriter, part_bytes=1)\n"
    program = (
        "import sys, torch\nfrom functools import partial\nfrom promoe.training import cli, collect\n"
        "from promoe.training.recorded_traces import TraceWriter\n" + small_parts + "torch.set_num_threads(1)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = command(tmp_path / "killed", tokens=1200)
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(part_paths(tmp_path / "killed")) >= 2 or process.poll() is not None)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    recorded = RecordedTrace(tmp_path / "killed").num_tokens
    assert 0 < recorded < 1200
    monkeypatch.setattr(collect_module, "TraceWriter", partial(TraceWriter, part_bytes=1))
    assert cli.main(arguments) == 0
    assert f"going on after the {recorded} tokens" in capsys.readouterr().out
    monkeypatch.undo()
    assert cli.main(command(tmp_path / "whole", tokens=1200)) == 0
    assert_same_rows(tmp_path / "killed", tmp_path / "whole")
    assert len(part_paths(tmp_path / "killed")) > len(part_paths(tmp_path / "whole")) == 1
    assert not list((tmp_path / "killed").glob("*.unfinished"))


# -- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1. Got 0"),
        (["--decode-share", "0.95"], "--decode-share must be 0 to 0.9"),
        (["--shard-index", "1"], "--shard-index must be 0 to 0. Got 1"),
        (["--dtype", "int8"], "--dtype must be of auto, float32, bfloat16, float16. Got 'int8'"),
        (["--cache", "lots"], "cache"),
        (["--max-prompt-tokens", "300"], "512 positions. Choose a smaller --max-prompt-tokens or --decode-share"),
        (["--max-prompt-tokens", "2"], "cannot be cut"),
        (["--max-tokens", "999999999999"], "Choose fewer --max-tokens"),
        (["--data", "none.jsonl"], "Cannot open none.jsonl"),
        (["--data", "DATA"], "holds no prompt"),
        (["--data", "DATA", "{}"], "holds no prompt but {}. Expected"),
        (["--data", "DATA", "[1]"], "holds no prompt but list"),
        (["--data", "DATA", "no JSON\n"], "is not JSON"),
        (["--data", "DATA", '{"prompt": " "}'], "holds no prompt"),
        (["--data", "DATA", '{"prompt": 3}'], '"prompt" must be a string'),
        (["--exclude", "none.json"], "Cannot open none.json"),
        (["--model", "./none"], "There is no folder './none'. Give the folder of a checkpoint"),
        (["--model", "DATA"], "is a file. Give the folder"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(
    arguments: list[str], message: str, command: Command, tmp_path: Path, capsys: Capture
) -> None:
    if "DATA" in arguments:
        data = tmp_path / "bad.jsonl"
        data.write_text("".join(arguments[2:]))
        arguments = [arguments[0], str(data)]
    assert cli.main(command(tmp_path / "out", *arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("promoe-train collect: ")
    assert not part_paths(tmp_path / "out")


@pytest.mark.parametrize(
    "arguments", [["--data", "none.jsonl"], ["--out", "FILE"], ["--seed", "1"], ["--dtype", "auto"]]
)
def test_data_and_folder_are_looked_at_before_a_model_is_opened(
    arguments: list[str], command: Command, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(command(tmp_path / "trace", tokens=1)) == 0
    before = sorted(path.name for path in (tmp_path / "trace").iterdir())
    monkeypatch.setattr(collect_module, "open_model", None)
    arguments = [str(tmp_path / "file") if text == "FILE" else text for text in arguments]
    assert cli.main(command(tmp_path / "trace", *arguments)) == 2
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == before


def test_a_mistake_in_the_data_leaves_no_folder_behind(command: Command, tmp_path: Path) -> None:
    assert cli.main(command(tmp_path / "out", "--data", "none.jsonl")) == 2
    assert cli.main(command(tmp_path / "out", "--max-tokens", "999999999999")) == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_models_trace(command: Command, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(command(tmp_path / "trace", tokens=1)) == 0
    other = write_checkpoint(tmp_path / "other", hidden=32)
    assert cli.main(command(tmp_path / "trace", "--model", str(other))) == 2
    assert f"{other}' was asked for. Repeat the command as it was" in capsys.readouterr().err
    # The same name, and another model under it.
    info = json.loads((tmp_path / "trace" / INFO_FILE).read_text()) | {"model": str(other)}
    (tmp_path / "trace" / INFO_FILE).write_text(json.dumps(info))
    assert cli.main(command(tmp_path / "trace", "--model", str(other))) == 2
    assert "holds a trace with hidden_size = 64, and 32 was asked for" in capsys.readouterr().err


def test_a_model_without_moe_layers(shared: Path, command: Command, tmp_path: Path, capsys: Capture) -> None:
    build("llama", vocab_size=259).save_pretrained(tmp_path / "dense")
    for path in (shared / "checkpoint").glob("token*"):
        (tmp_path / "dense" / path.name).write_bytes(path.read_bytes())
    for more in ([], ["--cache", "50%"]):
        assert cli.main(command(tmp_path / "out", "--model", str(tmp_path / "dense"), *more)) == 2
        assert "no MoE layers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--cache", "50%"]], ids=str)
@pytest.mark.parametrize("harm", ["cut weights", "no weights", "no config", "no tokenizer"])
def test_a_damaged_checkpoint(
    harm: str, more: list[str], shared: Path, command: Command, tmp_path: Path, capsys: Capture
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (shared / "checkpoint").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    if harm == "cut weights":
        os.truncate(model / "model.safetensors", 5000)
    for pattern in {"no weights": ["*.safetensors"], "no config": ["config.json"], "no tokenizer": ["token*"]}.get(
        harm, []
    ):
        for path in model.glob(pattern):
            path.unlink()
    assert cli.main(command(tmp_path / "out", "--model", str(model), *more)) == 2
    assert str(model) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
