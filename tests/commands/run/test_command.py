from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM

from promoe import cli
from promoe.commands.report.command import SAME
from promoe.commands.run import command as running
from promoe.errors import CheckpointError, ExpertLoadError
from promoe.stats.text_report import load_run
from promoe.transfer.cpu_contention import Taken

PROMPT = "What is a lighthouse?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


def stock_answer(checkpoint: str, new_tokens: int) -> str:
    tokenizer = running.load_tokenizer(checkpoint)
    inputs = running.prompt_inputs(tokenizer, PROMPT)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_run_streams_the_unmodified_models_answer_and_reports(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--cache", "25%", "--max-new-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n") == stock_answer(checkpoint, 8).removesuffix("\n")
    assert "6 slots for 24 experts" in captured.err
    assert "to the first token, then" in captured.err
    assert "policy next_use, predictor gate" in captured.err


def test_live_on_a_terminal_draws_a_panel_and_leaves_the_answer_as_it_is(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("promoe.commands.terminal._size", lambda: (100, 30))
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli.main(["run", checkpoint, PROMPT, "--cache", "25%", "--max-new-tokens", "8", "--live"]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == stock_answer(checkpoint, 8).removesuffix("\n")
    sent = screen.getvalue()
    assert "reading a prompt of" in sent
    assert sent.index("6 slots for 24 experts") > sent.rindex("\033[J"), "the status is gone before the report"


def test_live_without_a_terminal_writes_lines(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(running, "LOG_EVERY_S", 0.0)
    assert cli.main(["run", checkpoint, PROMPT, "--cache", "25%", "--max-new-tokens", "6", "--live"]) == 0
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n") == stock_answer(checkpoint, 6).removesuffix("\n")
    lines = [line for line in captured.err.splitlines() if "tokens/s, hit rate" in line]
    counted = [int(line.split()[0]) for line in lines]
    assert counted == list(range(2, len(counted) + 2))
    assert len(counted) >= 3
    assert all("link use" in line and "stall" in line and "ready rate" in line for line in lines)


def test_run_writes_timeline_and_report(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, report = tmp_path / "t.json", tmp_path / "r.html"
    arguments = ["run", checkpoint, PROMPT, "--max-new-tokens", "4", "--trace", str(trace), "--report", str(report)]
    assert cli.main([*arguments, "--predictor", "none"]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["name"].startswith("experts L") for event in events)
    assert "predictor none" in capsys.readouterr().err
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert "TPOT" in report.read_text()
    assert "One token, from begin to end" in report.read_text()
    saved = load_run(tmp_path / "r.json")
    assert saved.run.stats.decode.tokens == 3
    assert saved.run.token is not None
    assert [visit.layer for visit in saved.run.token.visits] == list(range(len(saved.run.stats.num_experts)))
    assert saved.conditions["model"] == checkpoint
    assert saved.conditions["prompt"] == PROMPT
    assert saved.conditions["tokens"] == "4 generated, greedy"
    assert f"transformers {transformers.__version__}" in saved.conditions["versions"]
    assert set(SAME) <= set(saved.conditions)


@pytest.mark.parametrize(("by_others", "said"), [(1.0, True), (0.05, False), (None, False)])
def test_cores_that_others_keep_busy_are_said(
    by_others: float | None,
    said: bool,
    checkpoint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = None if by_others is None else Taken(2, by_others, 0.0)
    monkeypatch.setattr(running.CoreWatch, "taken", lambda watch: taken)
    assert cli.main(["run", checkpoint, PROMPT, "--max-new-tokens", "2", "--report", str(tmp_path / "r.html")]) == 0
    words = "cores     other processes took 1.00 of 2 cores, the host withheld 0.00. Stop them, or compute on as many"
    assert (words in capsys.readouterr().err) == said
    assert ("cores" in load_run(tmp_path / "r.json").conditions) == (taken is not None)


def test_a_report_needs_no_timeline(checkpoint: str, tmp_path: Path) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--max-new-tokens", "4", "--report", str(tmp_path / "r.html")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json"]
    assert load_run(tmp_path / "r.json").run.token is not None


def test_of_one_token_there_is_no_decode_pass_to_draw(checkpoint: str, tmp_path: Path) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--max-new-tokens", "1", "--report", str(tmp_path / "r.html")]) == 0
    assert load_run(tmp_path / "r.json").run.token is None


def test_run_with_all_experts_in_ram_gives_the_same(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--store", "host", "--max-new-tokens", "6"]) == 0
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n") == stock_answer(checkpoint, 6).removesuffix("\n")
    assert "24 slots for 24 experts (100%)" in captured.err


def test_sampling_repeats_with_its_seed(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: int) -> str:
        arguments = ["--temperature", "3", "--seed", str(seed), "--max-new-tokens", "24"]
        assert cli.main(["run", checkpoint, PROMPT, *arguments]) == 0
        return capsys.readouterr().out

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)


def test_a_temperature_that_floats_cannot_divide_by_is_greedy(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--max-new-tokens", "6", "--temperature", "1e-300"]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == stock_answer(checkpoint, 6).removesuffix("\n")


def test_the_tokenizer_of_a_larger_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(20)
    model.save_pretrained(folder)
    assert cli.main(["run", str(folder), PROMPT, "--max-new-tokens", "2"]) == 2
    assert "but the model has only 20 tokens: they do not belong together" in capsys.readouterr().err


def test_a_prompt_goes_through_the_chat_template_where_there_is_one(checkpoint: str, tmp_path: Path) -> None:
    tokenizer = running.load_tokenizer(checkpoint)
    ids = running.prompt_inputs(tokenizer, "hi")["input_ids"]
    assert tokenizer.decode(ids[0]) == "<|human|>hi<|gpt|>"
    plain = running.load_tokenizer(str(write_checkpoint(tmp_path / "plain", chat=False)))
    assert plain.decode(running.prompt_inputs(plain, "hi")["input_ids"][0]) == "hi"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "0.1%"], "at least"),
        (["--cache", "much"], "'cache' argument must be a size"),
        (["--predictor", "crystal"], "Got 'crystal' instead"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature must be 0"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    checkpoint: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", checkpoint, PROMPT, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("promoe run: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_missing_model_and_an_empty_prompt_are_explained(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(tmp_path / "none"), PROMPT]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert cli.main(["run", checkpoint, "  "]) == 2
    assert "The prompt is empty" in capsys.readouterr().err
    assert cli.main(["run", checkpoint, "caf\udce9"]) == 2
    assert r"The prompt is no text in UTF-8: 'caf\udce9'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["run", str(tmp_path / "empty"), PROMPT]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_devices_that_cannot_be_had_are_explained(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", checkpoint, PROMPT, "--device", "abacus"]) == 2
    assert 'must be "cpu" or "cuda". Got \'abacus\'' in capsys.readouterr().err
    assert cli.main(["run", checkpoint, PROMPT, "--device", "cuda", "--store", "host"]) == 2
    assert "--store host keeps all experts in RAM" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_outputs_are_refused_before_the_model_is_opened(
    checkpoint: str, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr(running, "from_pretrained", opened)
    monkeypatch.setattr(running, "load_tokenizer", opened)
    assert cli.main(["run", checkpoint, PROMPT, option, str(tmp_path / "no" / "file")]) == 2
    assert "does not exist" in capsys.readouterr().err
    same = str(tmp_path / "same")
    assert cli.main(["run", checkpoint, PROMPT, "--trace", same, "--report", same]) == 2
    assert "would write the same file" in capsys.readouterr().err


def test_an_error_while_generating_ends_the_text_and_the_threads(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ExpertLoadError("Expert 3 of MoE layer 1 could not be fetched.")

    monkeypatch.setattr(running, "generate", fail)
    assert cli.main(["run", checkpoint, PROMPT]) == 2
    assert capsys.readouterr().err.endswith("promoe run: Expert 3 of MoE layer 1 could not be fetched.\n")
    # The fixture of conftest.py sees whether a thread is left.


def test_the_command_in_a_process_of_its_own(checkpoint: str) -> None:
    arguments = ["run", checkpoint, PROMPT, "--cache", "50%", "--max-new-tokens", "4"]
    command = [sys.executable, "-m", "promoe.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == stock_answer(checkpoint, 4).removesuffix("\n")
    assert "12 slots for 24 experts" in done.stderr
    assert torch.get_num_threads() == 1


def test_a_tokenizer_that_knows_nothing_is_said() -> None:
    """As Transformers makes one where its files are missing."""

    class Empty:
        chat_template = None

        def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            return {name: torch.zeros((1, 0), dtype=torch.long) for name in ("input_ids", "attention_mask")}

    with pytest.raises(CheckpointError, match="turns the prompt into no tokens"):
        running.prompt_inputs(Empty(), PROMPT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "page.json"], "--report writes a page, and its numbers beside it as .json"),
        (["--store", "host", "--cache", "5%"], "--cache 5% would do nothing"),
        (["--store", "host", "--experts", "folder"], "with the checkpoint's own experts"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    checkpoint: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", checkpoint, PROMPT, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "experts"),
    [
        ([], "auto"),
        (["--experts", "folder"], "folder"),
        (["--experts", "checkpoint"], "checkpoint"),
        (["--store", "host"], "checkpoint"),
    ],
)
def test_which_copy_of_the_experts_is_read(
    checkpoint: str, arguments: list[str], experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def opened(path: str, **options: Any) -> None:
        asked.update(options)
        raise CheckpointError("enough")

    monkeypatch.setattr(running, "from_pretrained", opened)
    assert cli.main(["run", checkpoint, PROMPT, *arguments]) == 2
    assert asked["experts"] == experts


def test_a_name_that_is_neither_folder_nor_id_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "nothere", PROMPT]) == 2
    assert "There is no folder 'nothere', and nothing of that name could be downloaded" in capsys.readouterr().err
