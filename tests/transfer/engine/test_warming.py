"""Warming the cache."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import WAIT_S, settle, until

from promoe.errors import (
    EngineClosedError,
    EngineStalledError,
)
from promoe.scheduler import ExpertKey
from promoe.transfer.engine import waiter as waiter_module

from .engines import CHUNKS, EXPERTS, LAYERS, Failing, Recording, resident, running, visit

RATES = [[0.5] * EXPERTS] * LAYERS


def keys_of(layer_idx: int, *expert_ids: int) -> list[ExpertKey]:
    return [ExpertKey(layer_idx, expert_idx) for expert_idx in expert_ids]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_warming_fills_free_slots_best_first_and_waits_for_them(workers: int) -> None:
    with running(slots=4, workers=workers) as (engine, link):
        visit(engine, 0, [1])
        link.started.clear()
        assert engine.warm(keys_of(1, 5, 2, 4, 0, 3), RATES) == 3
        assert resident(engine) == {(0, 1), (1, 5), (1, 2), (1, 4)}
        assert len(link.started) == 3 * CHUNKS
        assert engine.recorder.phase_stats("prefill").evictions == 0
        assert visit(engine, 1, [2, 4, 5]) == [2, 4, 5]
        assert len(link.started) == 3 * CHUNKS
        assert engine.warm(keys_of(1, 5), RATES) == 1  # is there
        assert engine.warm([], RATES) == 0
        assert engine.waiters == []


def test_a_forward_goes_before_what_warms() -> None:
    held = lambda key, idx: key == (1, 0) and idx == 1  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=4) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        warming = threads.submit(engine.warm, keys_of(1, 0, 1), RATES)
        until(lambda: (ExpertKey(1, 0), 1) in link.started)
        forward = threads.submit(visit, engine, 0, [3])
        until(lambda: len(engine.waiters) == 2)
        link.open.set()
        forward.result(WAIT_S)
        assert warming.result(WAIT_S) == 2
        after = link.started[link.started.index((ExpertKey(1, 0), 1)) + 1 :]
        assert after[:CHUNKS] == [(ExpertKey(0, 3), idx) for idx in range(CHUNKS)]
        assert resident(engine) == {(0, 3), (1, 0), (1, 1)}


def test_warming_ends_where_others_take_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to send then, and only the worker that finds out can say so."""
    monkeypatch.setattr(waiter_module, "HEARTBEAT_S", 10 * WAIT_S)
    held = lambda key, idx: key == (1, 0) and idx == 0  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=3, stall_timeout_s=10 * WAIT_S) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        warming = thread.submit(engine.warm, keys_of(1, 0, 1, 2, 3), RATES)
        until(lambda: link.started)
        engine.hint(0, [3, 4])
        link.open.set()
        assert warming.result(WAIT_S) == 1
        settle(engine)
        assert resident(engine) == {(0, 3), (0, 4), (1, 0)}


def test_what_cannot_be_fetched_is_left_to_demand_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with running(Failing, slots=4) as (engine, link):
        link.broken = {ExpertKey(1, 5)}
        with caplog.at_level(logging.WARNING):
            assert engine.warm(keys_of(1, 5, 2), RATES) == 1
        (message,) = caplog.messages
        assert message.startswith("1 experts could not be fetched to warm the cache")
        assert "expert_idx=5" in message
        assert resident(engine) == {(1, 2)}
        link.broken.clear()
        assert visit(engine, 1, [5]) == [5]


def test_closing_ends_warming() -> None:
    with (
        running(lambda link: Recording(link, lambda key, idx: True)) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        warming = threads.submit(engine.warm, keys_of(0, 0, 1), RATES)
        until(lambda: link.started)
        closing = threads.submit(engine.close)
        with pytest.raises(EngineClosedError):
            warming.result(WAIT_S)
        link.open.set()
        closing.result(WAIT_S)
        with pytest.raises(EngineClosedError):
            engine.warm(keys_of(0, 0), RATES)
        assert engine.waiters == []


def test_warming_that_does_not_go_on_is_an_error() -> None:
    make = lambda link: Recording(link, lambda key, idx: idx == 1)  # noqa: E731
    with running(make, stall_timeout_s=0.05) as (engine, link):
        with pytest.raises(EngineStalledError, match=r"The cache is being warmed.*stall_timeout_s=0.05"):
            engine.warm(keys_of(0, 0, 1), RATES)
        assert not engine.scheduler._warm
        link.open.set()
        settle(engine)
