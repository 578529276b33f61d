from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from commands.doctor.test_advice import WELL, facts
from promoe import cli, command_line
from promoe.commands.doctor import command
from promoe.commands.doctor.chaos import WRONG, Outcome
from promoe.commands.doctor.options import Options


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_facts", lambda folder: facts(threads=4))
    monkeypatch.setattr(command, "chaos", lambda: [Outcome("failed", 3, {}, 5, "")])


@pytest.mark.usefixtures("no_measuring")
def test_a_block_to_paste_and_what_it_means(tmp_path: Path) -> None:
    out = io.StringIO()
    assert command.run_doctor(Options(str(tmp_path), json=str(tmp_path / "doctor.json")), out)
    _, block, rest = out.getvalue().split("```")
    assert "3.50 GB/s O_DIRECT" in block
    assert "torch computes with 4 of 8 cores" in rest
    assert "its reads failing" not in rest
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["facts"]["disk"]["direct_bytes_per_s"] == 3.5e9
    assert len(found["advice"]) == 1
    assert found["chaos"] == []


@pytest.mark.usefixtures("no_measuring")
def test_a_wrong_answer_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(tmp_path), "--chaos"]) == 0
    printed = capsys.readouterr().out
    assert "its reads failing" in printed
    assert "All 5 answers are bit by bit those of the unpatched model." in printed
    monkeypatch.setattr(command, "chaos", lambda: [Outcome("torn", 3, {}, 1, WRONG)])
    assert cli.main(["doctor", str(tmp_path), "--chaos"]) == command_line.EXIT_DIFFERENT_TOKENS
    assert WRONG in capsys.readouterr().out
    assert cli.main(["doctor", str(tmp_path)]) == 0


def test_where_nothing_stands_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "find_facts", lambda folder: WELL)
    out = io.StringIO()
    command.run_doctor(Options(str(tmp_path)), out)
    assert out.getvalue().endswith("\nNothing stands out.\n")


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path / "missing")]) == 2
    assert "could not be measured" in capsys.readouterr().err
