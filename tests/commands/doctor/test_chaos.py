from __future__ import annotations

import logging

import pytest

from promoe.commands.doctor import chaos as module
from promoe.commands.doctor.chaos import ANSWERS, NEVER, WRONG, Outcome, chaos
from promoe.commands.doctor.command import chaos_lines, verdict
from promoe.transfer.links.faults import FaultKind

TORN = "a read gives garbage, then fails"


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


def test_slow_reads_are_no_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which any read takes longer than a read that never returns is waited for."""
    kinds: dict[FaultKind, str] = {"stuck": "a read never returns"}
    monkeypatch.setattr(module, "KINDS", kinds)
    monkeypatch.setattr(module, "STALL_TIMEOUT_S", 1e-6)
    none, stuck = chaos()
    assert none == Outcome("no fault", 0, {}, ANSWERS, "")
    assert (stuck.errors, stuck.right, stuck.end) == ({"EngineStalledError": 1}, ANSWERS, "")


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the comparison might compare nothing. Nobody else can find them: that is what `verify` is for."""
    kinds: dict[FaultKind, str] = {"wrong": "a byte differs"}
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
    assert [line.split("  ")[1] for line in lines] == ["fault", "a read fails", "the thread that reads ends", TORN]
    assert "2 ExpertLoadError, 1 EngineError" in lines[1]
    assert max(map(len, lines)) <= 110


def test_the_verdict() -> None:
    failed, ended = Outcome("failed", 3, {"ExpertLoadError": 2}, 5, ""), Outcome("exit", 1, {}, 2, "closed: a reason")
    assert verdict([failed, ended])[0].startswith("  - All 7 answers are bit by bit those of the unpatched model.")
    assert verdict([failed, ended])[1:] == ["  - the thread that reads ends: closed: a reason"]
    for end in (WRONG, NEVER):
        bad = verdict([failed, Outcome("torn", 1, {}, 0, end), ended])
        assert bad[0].startswith(f"  - NOT all was right: {TORN}: {end}.")
        assert bad[1:] == ["  - the thread that reads ends: closed: a reason"]
