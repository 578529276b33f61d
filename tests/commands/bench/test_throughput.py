"""`promoe bench --task throughput` on a tiny checkpoint, with real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands.bench.test_run import command, folder  # noqa: F401
from commands.plan.planned import link
from promoe import cli
from promoe.commands.bench.many import Many, ManyAnswers
from promoe.commands.bench.options import Options
from promoe.commands.bench.systems import KNOWN
from promoe.commands.bench.tasks import TokensDifferError
from promoe.commands.bench.throughput import ThroughputBench
from promoe.commands.plan import many_prompts
from promoe.commands.plan.throughput import StepCost
from promoe.errors import ConfigError

SYSTEMS = ["gate", "fast", "page-cache", "disk-offload", "eliseev-naive"]


@pytest.fixture(scope="module")
def options(folder: Path) -> list[str]:  # noqa: F811
    return [*command(folder), "--task", "throughput", "--lengths", "10:20", "--at-once", "3", "2"]


@pytest.fixture(scope="module")
def found(options: list[str], folder: Path) -> dict[str, Any]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_prompts, "measure_link", lambda stand_in, store, folder, mode, workers: link())
        patch.setattr(many_prompts, "measure_steps", lambda stand_in: StepCost(1e-3, 0.0, 1e-4, 1e-9))
        assert cli.main(options) == 0
    report: dict[str, Any] = json.loads((folder / "out" / "bench.json").read_text())
    return report


def test_each_system_answers_in_the_ways_that_suit_it(found: dict[str, Any]) -> None:
    ways = [(row["system"], row["way"], row["at_once"]) for row in found["rows"]]
    assert found["failed"] == {}
    assert ways == [
        ("resident", "together", 2),
        ("resident", "together", 3),
        ("gate", "alone", 1),
        ("gate", "padded", 2),
        ("gate", "padded", 3),
        ("gate", "together", 2),
        ("gate", "together", 3),
        ("fast", "together", 2),
        ("fast", "together", 3),
        ("page-cache", "together", 3),
        ("disk-offload", "padded", 3),
        ("eliseev-naive", "padded", 3),
    ]


def test_answers_are_counted_and_compared(found: dict[str, Any], folder: Path) -> None:  # noqa: F811
    for row in found["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["prompts"] * 5 / row["took_s"])
        assert 0 < row["waited_s"] <= row["took_s"]
        if row["way"] != "together" or row["system"] == "resident":
            assert row["same_answers"] is None
        elif row["system"] in ("gate", "page-cache"):
            assert row["same_answers"] == 1.0
        else:
            assert 0 <= row["same_answers"] <= 1
        ours = row["system"] in ("gate", "fast", "eliseev-naive")
        assert (row["bytes_per_token"] is not None) == ours
        assert (row["planned_tokens_per_s"] is not None) == (ours and row["way"] == "together")
    moved = {(row["system"], row["way"], row["at_once"]): row["bytes_per_token"] for row in found["rows"]}
    assert moved["gate", "together", 3] < moved["gate", "alone", 1]
    text = (folder / "out" / "throughput.md").read_text()
    assert "x one by one" in text
    assert (folder / "out" / "throughput.png").stat().st_size > 10_000


def test_other_tokens_end_the_run(options: list[str], folder: Path) -> None:  # noqa: F811
    bench = ThroughputBench(
        Options(
            str(folder / "checkpoint"),
            task="throughput",
            prompts=str(folder / "prompts.json"),
            pairs=2,
            at_once=[2],
            out=str(folder / "other"),
        )
    )
    right = ManyAnswers([[1, 2], [3, 4]], 1.0, 0.5)
    wrong = replace(right, tokens=[[1, 2], [3, 5]])
    many = Many([[1], [2]], 2, "together", 2)
    assert bench._same(KNOWN["gate"], many, right, right) == 1.0
    assert bench._same(KNOWN["fast"], many, wrong, right) == 0.5
    with pytest.raises(TokensDifferError, match="1 of 2 answers"):
        bench._same(KNOWN["gate"], many, wrong, right)


def test_mistakes_are_answered() -> None:
    with pytest.raises(ConfigError, match="--at-once"):
        Options(at_once=[0])
    assert Options(task="throughput").named_systems == SYSTEMS
    assert "resident" in Options().named_systems
