"""Closing an engine, and renewing it after an interrupted change."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import WAIT_S, until

from promoe.errors import (
    EngineClosedError,
    EngineError,
    EngineStalledError,
)
from promoe.transfer.engine import Engine

from .engines import EXPERTS, Recording, in_the_midst_of_a_hint, running, visit


def test_closing_wakes_a_forward_that_waits() -> None:
    with (
        running(lambda link: Recording(link, lambda key, idx: True)) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = threads.submit(visit, engine, 0, [0])
        until(lambda: engine.waiters)
        closing = threads.submit(engine.close)  # its worker is in a transfer, which lands first
        with pytest.raises(EngineClosedError, match=r"closed.*unpatch"):
            waiting.result(WAIT_S)
        link.open.set()
        closing.result(WAIT_S)
        assert not any(thread.is_alive() for thread in engine._threads)


def test_a_closed_engine_refuses_visits_and_ignores_the_rest() -> None:
    with running() as (engine, link):
        visit(engine, 0, [0])
        engine.close()
        engine.close()
        assert engine.closed
        with pytest.raises(EngineClosedError):
            visit(engine, 0, [0])
        started = len(link.started)
        engine.hint(0, [1])
        assert not engine.forecast(engine.scheduler.step, 1, 1, [1.0] * EXPERTS)
        assert len(link.started) == started


def test_a_signal_handler_that_closes_does_not_wait_for_workers_that_wait_for_it() -> None:
    with running(stall_timeout_s=2 * WAIT_S) as (engine, _):
        started_s = time.monotonic()
        in_the_midst_of_a_hint(engine, engine.close)
        assert time.monotonic() - started_s < WAIT_S, "it waited for workers, which need the lock that its thread had"
        with pytest.raises(EngineClosedError):
            visit(engine, 0, [1])
        for thread in engine._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_closing_does_not_wait_for_ever_for_a_transfer_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    with (
        running(lambda link: Recording(link, lambda key, idx: True)) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        link.close = lambda: None  # type: ignore[method-assign]  # it would end the hanging
        waiting = thread.submit(visit, engine, 0, [0])
        until(lambda: link.started)
        engine.stall_timeout_s = 0.05
        with pytest.raises(EngineStalledError):
            waiting.result(WAIT_S)
        engine.close()
        assert "promoe-link-0 still in a transfer after 0.1 s" in caplog.text
        link.open.set()
        engine._threads[0].join(WAIT_S)
        assert not engine._threads[0].is_alive()


def test_what_is_whole_is_not_renewed() -> None:
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1, 2])
        before = engine.scheduler
        engine.renew()
        assert engine.scheduler is before
        assert visit(engine, 0, [1, 2]) == [1, 2]


def torn(engine: Engine) -> None:
    with engine.lock:
        engine.change_failed(KeyboardInterrupt())


def test_who_computes_with_slots_of_before_a_renewal_is_told() -> None:
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1, 2])

        def compute() -> None:
            with engine.visit(0, [1, 2]) as layer_visit:
                assert layer_visit.all_rows() is not None
                torn(engine)
                engine.renew()

        with pytest.raises(EngineError, match="renewed meanwhile"):
            compute()
        with engine.visit(0, [1, 2]) as layer_visit:
            groups = layer_visit.groups()
            next(groups)
            torn(engine)
            engine.renew()
            with pytest.raises(EngineError, match="renewed meanwhile"):
                next(groups)
            layer_visit._visit = None  # in a forward, that error would have ended the visit
        assert visit(engine, 0, [1, 2]) == [1, 2]


def test_a_forecast_of_before_a_renewal_is_dropped() -> None:
    with running(slots=4) as (engine, _):
        for _ in range(5):
            visit(engine, 0, [1, 2])
        origin_step = engine.scheduler.step
        torn(engine)
        engine.renew()
        assert not engine.forecast(origin_step, 2, 1, [1.0] * EXPERTS)
        assert engine.forecast(engine.scheduler.step + 1, 2, 1, [1.0] * EXPERTS)


def test_without_all_of_its_workers_it_is_not_renewed(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (engine, _):
        torn(engine)
        with engine.lock:
            engine._assigned.append(object())  # type: ignore[arg-type]  # of which it dies
            engine._work.notify()
        engine._threads[0].join(WAIT_S)
        engine.renew()
        for _ in range(2):
            with pytest.raises(EngineError, match="open it again"):
                visit(engine, 0, [1])
        engine.torn = False  # for the checks at the end
