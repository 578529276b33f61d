from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkout

from promoe import cli
from promoe.commands import lower_bound as bound
from promoe.commands.bench import served
from promoe.commands.bench.messages import Opening
from promoe.commands.demo import command
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import RESIDENT, SYSTEMS
from promoe.errors import ConfigError
from promoe.transfer.cpu_contention import BusyCores, CoreWatch, Taken

QUICK = ["demo", "--prompts", "2", "--max-new-tokens", "4", "--repeat", "8", "--cache", "40%"]
STEPS = [*QUICK, "--steps"]
LEARNED = "promoe, trained"
SHOWN = ["on-demand LRU", "promoe", LEARNED]
ALL_STEPS = [*(system.name for system in SYSTEMS), "+ learned prefetch"]


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_checkout(tmp_path))
    monkeypatch.setattr(bound, "PROBE_SECONDS", 0.01)
    return tmp_path


def rows(text: str) -> list[str]:
    """Names of the table's rows, in order, of all tables printed."""
    names = {RESIDENT.name, *SHOWN, *ALL_STEPS}
    return [name for line in text.splitlines() for name in names if line.startswith(f"{name}  ")]


def test_both_parts_have_all_systems_and_write_what_they_say(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(QUICK) == 0
    text = capsys.readouterr().out
    assert text.index("4 tokens in ") < text.index("on-demand LRU"), "the first look comes first"
    assert rows(text) == [RESIDENT.name, *SHOWN] * 2
    assert text.count("All tokens agree: 8 tokens of 2 answers") == 2
    for column in ("TTFT", "TPOT", "hit", "ready", "stall", "MB/token", "bound", "ratio"):
        assert column in text
    assert "12.2 to 1" in text
    assert text.count("other processes took ") == 2
    assert "O_DIRECT" in text
    assert max(len(line) for line in text.splitlines()) <= 110 + len(str(checkout))
    for part in ("emulated-link", "real-disk"):
        report = checkout / "promoe-out" / f"{part}-report.html"
        timeline = checkout / "promoe-out" / f"{part}-timeline.json"
        assert str(report.relative_to(checkout)) in text
        assert report.read_text().startswith("<!DOCTYPE html>")
        assert all(name in report.read_text() for name in (RESIDENT.name, *SHOWN))
        assert json.loads(timeline.read_text())["traceEvents"]
    # Again: what was widened is used again.
    wide = next((checkout / "promoe-out").glob("widened-x8-*")) / "config.json"
    before = wide.stat().st_mtime_ns
    assert cli.main([*QUICK, "--prompts", "1"]) == 0
    assert wide.stat().st_mtime_ns == before


def test_each_idea_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*STEPS, "--skip-widened"]) == 0
    text = capsys.readouterr().out
    assert rows(text) == [RESIDENT.name, *ALL_STEPS]
    assert "every row adds one to the row above it" in text


@pytest.mark.slow
def test_without_a_predictor_that_row_is_left_out(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = checkout / "examples" / "sharegpt_moe"
    (example / "checkpoint").rename(checkout / "other")
    assert cli.main([*QUICK, "--skip-widened", "--model", str(checkout / "other")]) == 0  # it is not that model's
    text = capsys.readouterr().out
    assert LEARNED not in text
    assert "timeline of “promoe”" in text
    (checkout / "other").rename(example / "checkpoint")
    shutil.rmtree(example / "predictor")
    assert cli.main([*QUICK, "--skip-widened"]) == 0
    assert LEARNED not in capsys.readouterr().out


def test_a_readable_model_shows_prose_and_any_other_its_routing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*QUICK, "--skip-widened"]) == 0
    text = capsys.readouterr().out
    assert "prompt  Question 1" in text
    assert "answer  " in text
    assert "Experts needed" not in text
    card = checkout / "examples" / "sharegpt_moe" / "checkpoint" / "README.md"
    card.write_text("| held-out loss | **4.200** nats per token |")
    assert cli.main([*QUICK, "--skip-widened"]) == 0
    text = capsys.readouterr().out
    assert "held-out loss is 4.2 nats per token" in text
    assert "answer  " not in text
    heat = [line for line in text.splitlines() if line.endswith("│")]
    assert len(heat) == 3
    assert all(len(line.split("│")[1]) == 8 and "@" in line for line in heat)


def test_other_tokens_fail_the_demo_loudly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    really = served._open

    def broken(opening: Opening) -> Any:
        model: Any = really(opening)
        if opening.system.name == "promoe":
            model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))
        return model

    monkeypatch.setattr(served, "_open", broken)
    assert cli.main(QUICK) == 1
    text = capsys.readouterr().out
    assert "FAILED: THE OUTPUT IS NOT THE SAME" in text
    assert "“promoe” generated other tokens" in text
    assert "All tokens agree" not in text


@pytest.mark.slow
def test_where_ram_is_short_the_resident_row_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "free_ram_bytes", lambda: 1000)
    assert cli.main([*QUICK, "--prompts", "1"]) == 0
    text = capsys.readouterr().out
    assert "that row is left out" in " ".join(text.split())
    assert rows(text).count(RESIDENT.name) == 1
    assert text.count("All tokens agree") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts must be at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--prompts", "50"], "holds 6 prompts; 51 are needed"),
        (["--model", "nowhere"], "no config.json"),
        (["--out", "examples/sharegpt_moe/widen.py/x"], "Cannot make the folder"),
        (["--cache", "lots"], "'cache' argument must be"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_options_say_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match=r"--repeat must be at least 1\. Got 0 instead"):
        Options(repeat=0)


def test_busy_cores_are_not_said_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BusyCores, "pass_ended", lambda self, duration_s: "others compute, too.")
    busy = Taken(2, 1.25, 0.0)
    monkeypatch.setattr(CoreWatch, "taken", lambda self: busy)
    assert cli.main([*QUICK, "--skip-widened"]) == 0
    captured = capsys.readouterr()
    assert "cores are busy" not in captured.out + captured.err + caplog.text
    assert captured.out.count("other processes kept 1.25") == 1
    assert captured.out.index("The demo took ") < captured.out.index("other processes kept 1.25")


@pytest.mark.parametrize(("by_others", "said"), [(1.25, True), (0.1, False), (None, False)])
def test_what_kept_the_cores_busy_is_said_once_at_the_end(
    by_others: float | None, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command._say_of_others(None if by_others is None else Taken(2, by_others, 0.0))
    assert ("other processes kept 1.25 of this machine's 2 cores busy" in capsys.readouterr().out) == said
