"""The command `promoe-train evaluate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promoe.training import cli, options

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
    assert lines[4].split() == ["kind", "k", "all", "exact", "cover", "25%", "50%"]
    assert lines[5].split() == ["token", "any", "100.0", "100.0", "2.0", "100/100", "100/100"]
    assert lines[6].startswith("correlation  any")  # in this trace
    result = json.loads(out.read_text())
    assert set(result) == {"token", "correlation"}
    assert set(result["token"]) == {"1", "2"}
    assert result["token"]["1"]["accuracy"] == 1.0
    assert set(result["token"]["1"]["misses"]["lru"]) == {"25%", "50%"}
    assert result["token"]["1"]["misses"]["lru"]["25%"]["recall"] == 1.0


def test_without_caches_only_accuracy_is_judged(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "--trace", trace, "--cache", "", "--lookahead", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["kind", "k", "all", "exact", "cover", "Brier"]
    assert lines[9] == ""
    assert "misses" not in "".join(lines[2:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "gate"], "The kind 'gate' predicts from hidden states"),
        (["--kinds", "gates"], "no kind 'gates'"),
        (["--bandwidth", "24GB/s"], "--expert-bytes is missing"),
        (["--plots", "/dev/null/plots"], "Cannot make the folder"),
        (["--kinds", "token,,gate"], "list with commas"),
        (["--lookahead", "0"], "at least 1. Got '0'"),
        (["--lookahead", "1.5"], "whole numbers of layers"),
        (["--fetched", "1,0"], "--fetched must be whole numbers of experts, at least 1. Got '0'"),
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


def test_a_library_may_be_missing(trace: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert cli.main(["evaluate", "--trace", trace]) == 2
    assert "sklearn is not installed. Try `pip install 'promoe[train]'`" in capsys.readouterr().err


def test_a_trace_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = save(random_trace(), tmp_path / "t.npz", token_index=np.zeros(3, dtype=int))
    assert cli.main(["evaluate", "--trace", str(bad)]) == 2
    assert "120 tokens, but (3,) token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("collect", "--decode-share"), ("fit", "--trainer.max-epochs"), ("evaluate", "--lookahead")]
)
def test_help_loads_no_training_library(command: str, option: str) -> None:
    program = (
        "import sys\nfrom promoe.training import cli\n"
        f"try:\n    cli.main(['{command}', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'lightning', 'datasets', 'sklearn', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert option in result.stdout
    assert result.stdout.strip().splitlines()[-1] == "[]"
