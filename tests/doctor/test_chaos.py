from __future__ import annotations

import logging

import pytest

from promoe.doctor import chaos as module
from promoe.doctor.chaos import ANSWERS, NEVER, WRONG, Outcome, chaos
from promoe.doctor.command import chaos_lines
from promoe.links.faults import FaultKind


def test_every_fault_is_survived() -> None:
    before = logging.getLogger("promoe").level
    outcomes = {outcome.kind: outcome for outcome in chaos()}
    assert logging.getLogger("promoe").level == before
    assert set(outcomes) == {"no fault", *module.KINDS}
    assert all(outcome.survived for outcome in outcomes.values()), outcomes
    assert outcomes["no fault"] == Outcome("no fault", 0, {}, ANSWERS, "")
    assert all(outcome.injected for kind, outcome in outcomes.items() if kind != "no fault")
    assert all(outcomes[kind].errors["ExpertLoadError"] for kind in ("failed", "short", "torn", "no_memory", "bug"))
    assert outcomes["stuck"].errors == {"EngineStalledError": 1}
    assert "closed" in outcomes["exit"].end


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the comparison might compare nothing. Nobody else can find them: that is what `verify` is for."""
    kinds: tuple[FaultKind, ...] = ("wrong",)
    monkeypatch.setattr(module, "KINDS", kinds)
    monkeypatch.setattr(module, "FAULT_SHARE", 0.5)
    none, wrong = chaos()
    assert none.survived
    assert wrong.end == WRONG
    assert not wrong.survived


def test_the_table() -> None:
    lines = chaos_lines(
        [
            Outcome("failed", 3, {"ExpertLoadError": 2, "EngineError": 1}, 5, ""),
            Outcome("exit", 1, {}, 0, "closed: " + "a long reason " * 9),
            Outcome("torn", 1, {}, 0, NEVER),
        ]
    )
    assert "2 ExpertLoadError, 1 EngineError" in lines[1]
    assert lines[2].endswith("...")
    assert max(map(len, lines)) <= 110
    assert NEVER in lines[3]
