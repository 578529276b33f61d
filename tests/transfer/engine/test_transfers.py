"""What link workers fetch, in which order, and what happens when a transfer fails."""

from __future__ import annotations

import errno
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import WAIT_S, settle, until

from promoe.errors import (
    EngineError,
    ExpertLoadError,
)
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk
from promoe.transfer.engine import Engine

from .engines import CHUNKS, EXPERTS, LAYERS, Failing, Recording, resident, running, visit


def test_a_hint_starts_what_is_missing_and_its_visit_finishes_it() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1])
        link.started.clear()
        assert engine.hint(0, [1, 2, 5]) == 1
        settle(engine)
        assert link.experts == [2, 5]
        assert resident(engine) >= {(0, 1), (0, 2), (0, 5)}
        with engine.visit(0, [1, 2, 5]) as layer_visit:
            assert layer_visit.all_rows() is not None
        assert len(link.started) == 2 * CHUNKS


def test_demand_waits_for_no_more_than_the_chunk_under_way() -> None:
    """Speculation is preempted between chunks: at most one of its chunks comes before the first demanded chunk."""
    with running(lambda link: Recording(link, lambda key, idx: key == (1, 0) and idx == 1), slots=4) as (engine, link):
        visit(engine, 0, [0])
        probabilities = [1.0, 1.0] + [0.0] * 4
        assert engine.forecast(engine.scheduler.step, 1, 1, probabilities)
        until(lambda: (ExpertKey(1, 0), 1) in link.started)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(visit, engine, 0, [3])
            until(lambda: engine.waiters)
            link.open.set()
            done.result(WAIT_S)
        held = link.started.index((ExpertKey(1, 0), 1))
        after = link.started[held + 1 :]
        assert after[:CHUNKS] == [(ExpertKey(0, 3), idx) for idx in range(CHUNKS)]
        settle(engine)
        assert {(1, 0), (1, 1)} <= resident(engine)  # and speculation was finished, not started again
        assert len(link.started) == len(set(link.started))


def test_workers_fetch_at_once() -> None:
    with running(lambda link: Recording(link, lambda key, idx: True), workers=3) as (engine, link):
        engine.hint(0, [0, 1])
        until(lambda: link.most_running == 3)
        assert link.started == [(ExpertKey(0, 0), idx) for idx in range(3)]
        link.open.set()
        visit(engine, 0, [0, 1])


def test_speculation_may_use_all_workers_and_demand_is_next() -> None:
    with running(lambda link: Recording(link, lambda key, idx: True), slots=6, workers=2) as (engine, link):
        assert engine.forecast(engine.scheduler.step, 1, 1, [1.0] * 4 + [0.0] * 2)
        until(lambda: link.most_running == 2)
        engine.hint(0, [0])
        link.open.set()
        settle(engine)
        layers = [key.layer_idx for key, _ in link.started]
        assert layers[:2] == [1, 1]
        assert 0 in layers[2:4]  # two workers may note their chunks in either order
        assert link.most_running == 2


def test_a_late_forecast_is_dropped() -> None:
    with running() as (engine, link):
        visit(engine, 0, [0])
        origin_step = engine.scheduler.step
        visit(engine, 1, [0])
        link.started.clear()
        assert not engine.forecast(origin_step, 1, 1, [1.0] * EXPERTS)
        assert engine.forecast(origin_step, 2, 2, [1.0] + [0.0] * 5)
        settle(engine)
        assert link.experts == [0]
        assert (2, 0) in resident(engine)


def test_reuse_is_foreseen_until_the_layer_is_visited_again() -> None:
    with running(slots=4) as (engine, _):
        told: list[tuple[int, bool]] = []
        foresee = engine.scheduler.foresee_reuse

        def noted(layer_idx: int, log_odds: Any, begun: bool) -> None:
            told.append((layer_idx, begun))
            foresee(layer_idx, log_odds, begun)

        engine.scheduler.foresee_reuse = noted  # type: ignore[method-assign]
        origin_step = engine.scheduler.step + 1
        assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)  # in the forward, before its visit
        visit(engine, 0, [0])
        assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)  # in a thread beside it
        for layer_idx in range(1, LAYERS):
            visit(engine, layer_idx, [0])
            assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)
        visit(engine, 0, [0])
        assert not engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)
        assert not engine.foresee_reuse(engine.scheduler.step + 2, 0, [0.0] * EXPERTS), "of before a renewal"
        assert told == [(0, False)] + [(0, True)] * LAYERS
    assert not engine.foresee_reuse(engine.scheduler.step, 0, [0.0] * EXPERTS), "closed"


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_demand_names_expert_source_and_cause(workers: int, hinted: bool) -> None:
    with running(Failing, workers=workers) as (engine, link):
        link.broken = {ExpertKey(1, 4)}
        if hinted:
            engine.hint(1, [0, 4])
        with pytest.raises(
            ExpertLoadError, match=r"Expert 4 of MoE layer 1.*tensor w of MoE layer 1.*offset \d+"
        ) as raised:
            visit(engine, 1, [0, 4])
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.EIO
        assert str(raised.value.__cause__) in str(raised.value)
        # The engine stays usable: for other experts at once, for this one as soon as the cause is mended.
        visit(engine, 1, [0, 1])
        with pytest.raises(ExpertLoadError):
            visit(engine, 1, [4])
        link.broken.clear()
        visit(engine, 1, [0, 4])


def test_experts_that_were_ready_run_before_the_failure_is_raised() -> None:
    with running(Failing) as (engine, link):
        visit(engine, 0, [1])
        link.broken = {ExpertKey(0, 2)}
        ran: list[int] = []
        layer_visit = engine.visit(0, [1, 2])
        with layer_visit, pytest.raises(ExpertLoadError):
            ran.extend(row for rows in layer_visit.groups() for row in rows)
        assert ran == [1]
        assert engine.recorder.phase_stats("prefill").failures_demand == 1


def test_a_failed_prefetch_is_counted_logged_once_and_retried_only_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    with running(Failing, workers=3) as (engine, link):
        visit(engine, 0, [0])
        link.broken = {ExpertKey(1, 2)}
        forecast = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        with caplog.at_level(logging.WARNING, "promoe.transfer.engine"):
            for _ in range(3):
                assert engine.forecast(engine.scheduler.step, 1, 1, forecast)
                settle(engine)
        tried = link.injected["torn"]
        assert 1 <= tried <= 3  # the chunks that were in flight together; none after the first was known to fail
        assert len(caplog.records) == 1
        assert "prefetch of ExpertKey(layer_idx=1, expert_idx=2) failed" in caplog.text
        counts = engine.recorder.phase_stats("prefill")
        assert (counts.failures_prefetch, counts.failures_demand) == (tried, 0)
        link.broken.clear()
        assert visit(engine, 1, [2]) == [2]


def test_a_failure_does_not_keep_the_others_from_running() -> None:
    with running(Failing, slots=1) as (engine, link), ThreadPoolExecutor(2) as threads:
        link.broken = {ExpertKey(0, 0)}

        def failing() -> int:
            failed = 0
            for _ in range(10):
                with pytest.raises(ExpertLoadError):
                    visit(engine, 0, [0])
                failed += 1
            return failed

        def working() -> None:
            for turn in range(20):
                visit(engine, 1, [turn % EXPERTS, (turn + 1) % EXPERTS])

        results = [threads.submit(failing), threads.submit(working)]
        assert results[0].result(WAIT_S) == 10
        results[1].result(WAIT_S)


class Fatal(Recording):
    """A link with a bug: it raises what no I/O raises."""

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        raise SystemExit("a bug in the link")


def test_a_dead_worker_is_an_engine_error(caplog: pytest.LogCaptureFixture) -> None:
    with running(Fatal, workers=2) as (engine, _):
        for _ in range(2):
            with pytest.raises(EngineError, match=r"worker died.*a bug in the link.*unpatch") as raised:
                visit(engine, 0, [0])
            assert isinstance(raised.value.__cause__, SystemExit)
        assert "died" in caplog.text


def test_any_error_of_a_link_is_reported_to_the_forward() -> None:
    class Buggy(Recording):
        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            raise ZeroDivisionError("a bug")

    with running(Buggy) as (engine, _):
        with pytest.raises(ExpertLoadError, match="a bug") as raised:
            visit(engine, 0, [0])
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_slot_holds_nan_from_its_experts_end_until_the_next_has_come() -> None:
    held = lambda key, idx: key.expert_idx == 1  # noqa: E731
    with running(lambda link: Recording(link, held), slots=1) as (engine, link), ThreadPoolExecutor(1) as thread:
        visit(engine, 0, [0])
        assert not engine.pools[0].tensors(0)["w"].isnan().any()
        waiting = thread.submit(visit, engine, 0, [1])
        until(lambda: link.experts == [0, 1])
        assert engine.pools[0].tensors(0)["w"].isnan().all()
        link.open.set()
        waiting.result(WAIT_S)


def test_the_timeline_may_end_while_chunks_are_under_way() -> None:
    """The tracer may be gone between a worker's two looks at it."""

    class Vanishing(Engine):
        looks = 0

        @property
        def tracer(self) -> Any:
            self.looks += 1
            return _Spans() if self.looks % 2 else None

        @tracer.setter
        def tracer(self, value: Any) -> None:
            pass

    class _Spans:
        def span(self, *args: Any, **kwargs: Any) -> None:
            pass

    with running() as (engine, _):
        engine.__class__ = Vanishing
        for layer_idx in range(LAYERS):
            visit(engine, layer_idx, [0, 1, 2, 3])
        assert engine._broken is None
        engine.__class__ = Engine
