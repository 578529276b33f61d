"""The command `promoe-train evaluate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from promoe.training import cli

from .traces import random_trace, save


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(save(random_trace(), tmp_path / "trace.npz"))


def test_it_prints_a_table_and_writes_json(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    arguments = ["--kinds", "token,correlation", "--lookahead", "1,2", "--cache", "25%,50%", "--policy", "lru"]
    assert cli.main(["evaluate", "--trace", trace, *arguments, "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 MoE layers, 8 experts, top 2" in lines[0]
    assert lines[1].startswith("fitted on 8 prompts (96 tokens), judged on 2 (24), misses on the first 24 of them")
    assert lines[3].split() == ["kind", "k", "accuracy", "lru", "25%", "lru", "50%"]
    assert [line.split()[:3] for line in lines[4:6]] == [["token", "1", "100.0"], ["token", "2", "100.0"]]
    assert len(lines) == 9
    result = json.loads(out.read_text())
    assert set(result) == {"token", "correlation"}
    assert set(result["token"]) == {"1", "2"}
    assert result["token"]["1"]["accuracy"] == 1.0
    assert set(result["token"]["1"]["misses"]["lru"]) == {"25%", "50%"}
    assert result["token"]["1"]["misses"]["lru"]["25%"] == {"recall": 1.0, "precision": 1.0}


def test_without_caches_only_accuracy_is_judged(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "--trace", trace, "--cache", "", "--lookahead", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["kind", "k", "accuracy"]
    assert len(lines) == 3 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "gate"], "no kind 'gate'"),
        (["--kinds", "token,,gate"], "list with commas"),
        (["--lookahead", "0"], "at least 1. Got '0'"),
        (["--lookahead", "1.5"], "whole numbers of layers"),
        (["--cache", "0.25"], "shares of the experts such as 12.5%"),
        (["--cache", "101%"], "up to 100%"),
        (["--policy", "belady"], "must be of lru, lfru, static, next_use. Got 'belady'"),
        (["--replay-tokens", "0"], "at least 1. Got 0"),
        (["--json", "no/such/folder.json"], "does not exist"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(
    arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", "--trace", trace, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = save(random_trace(), tmp_path / "t.npz", token_index=np.zeros(3, dtype=int))
    assert cli.main(["evaluate", "--trace", str(bad)]) == 2
    assert "120 tokens, but (3,) token ids" in capsys.readouterr().err


def test_help_loads_no_training_library() -> None:
    program = (
        "import sys\nfrom promoe.training import cli\n"
        "try:\n    cli.main(['evaluate', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'lightning', 'datasets', 'sklearn', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--lookahead" in result.stdout
    assert result.stdout.strip().splitlines()[-1] == "[]"
