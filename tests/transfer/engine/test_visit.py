"""A layer's visit: which experts come, in which groups, and what is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import WAIT_S, until

from promoe.errors import (
    ExpertLoadError,
)
from promoe.scheduler import ExpertKey

from .engines import CHUNKS, EXPERTS, LAYERS, Clock, Failing, running, visit


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, EXPERTS * LAYERS])
@pytest.mark.parametrize("reorder", [True, False])
def test_every_expert_arrives_whole(slots: int, workers: int, reorder: bool) -> None:
    with running(slots=slots, workers=workers, reorder=reorder) as (engine, _):
        for turn in range(3):
            for layer_idx in range(LAYERS):
                visit(engine, layer_idx, [turn, 5, 3] if turn != 3 else [0])


def test_all_rows_is_there_only_when_everything_is() -> None:
    with running() as (engine, _):
        with engine.visit(0, [1, 2]) as first:
            assert first.all_rows() is None
            assert [sorted(rows) for rows in first.groups()]
        with engine.visit(0, [1, 2]) as second:
            rows = second.all_rows()
            assert rows is not None
            assert sorted(rows) == [1, 2]


def test_an_empty_visit_has_all_it_needs() -> None:
    with running() as (engine, link), engine.visit(0, []) as nothing:
        assert nothing.all_rows() == {}
        assert list(nothing.groups()) == []
        assert link.started == []


def test_chunks_are_fetched_in_order_of_execution() -> None:
    with running(slots=5) as (engine, link):
        visit(engine, 0, [1, 4])
        link.started.clear()
        assert visit(engine, 0, [0, 1, 3, 4]) == [1, 4, 0, 3]
        assert link.started == [(ExpertKey(0, expert_idx), idx) for expert_idx in (0, 3) for idx in range(CHUNKS)]


def test_without_reorder_experts_run_and_come_in_id_order() -> None:
    with running(slots=5, reorder=False) as (engine, link):
        visit(engine, 0, [1, 4])
        link.started.clear()
        assert visit(engine, 0, [4, 3, 1, 0]) == [0, 1, 3, 4]
        assert link.experts == [0, 3]


def test_at_once_all_that_have_slots_are_one_group() -> None:
    """With small experts, a group costs more than it computes."""
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1])
        engine.recorder.reset()
        with engine.visit(0, [0, 1, 2]) as layer_visit:
            assert [sorted(rows) for rows in layer_visit.groups(at_once=True)] == [[0, 1, 2]]
        counts = engine.recorder.phase_stats("prefill")
        assert (counts.needed, counts.hits) == (3, 1)
        assert counts.ready >= 1  # expert 1 was not waited for, though it ran with the others
        with engine.visit(1, [0, 1, 2, 3, 4, 5]) as layer_visit:  # two waves
            groups = [len(rows) for rows in layer_visit.groups(at_once=True)]
        assert sum(groups) == EXPERTS
        assert max(groups) <= 4


def test_at_once_a_failure_is_raised_though_others_are_there() -> None:
    with running(Failing) as (engine, link):
        visit(engine, 0, [1])
        link.broken = {ExpertKey(0, 2)}
        layer_visit = engine.visit(0, [1, 2])
        with layer_visit, pytest.raises(ExpertLoadError):
            list(layer_visit.groups(at_once=True))


def test_several_forwards_wait_for_all_of_theirs_and_none_for_ever() -> None:
    with running(slots=3, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def run(layer_idx: int) -> int:
            ran = 0
            for round_idx in range(20):
                ids = [(round_idx + i) % EXPERTS for i in range(3)]
                with engine.visit(layer_idx % LAYERS, ids) as layer_visit:
                    ran += sum(len(rows) for rows in layer_visit.groups(at_once=True))
            return ran

        assert [done.result(WAIT_S) for done in [threads.submit(run, i) for i in range(3)]] == [60] * 3


def test_hits_are_what_was_resident_in_any_order_of_execution() -> None:
    for reorder in (True, False):
        with running(slots=5, reorder=reorder) as (engine, _):
            visit(engine, 0, [3, 4, 5])
            engine.recorder.reset()
            visit(engine, 0, [0, 3, 4])
            counts = engine.recorder.phase_stats("prefill")
            assert (counts.needed, counts.hits) == (3, 2)
            assert (counts.stall_s > 0) == (counts.ready < counts.needed)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_several_forwards_at_once(slots: int) -> None:
    with running(slots=slots, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def forward(seed: int) -> None:
            for turn in range(20):
                for layer_idx in range(LAYERS):
                    first = (seed + turn + layer_idx) % EXPERTS
                    visit(engine, layer_idx, [first, (first + 2) % EXPERTS, (first + 3) % EXPERTS])

        for result in [threads.submit(forward, seed) for seed in range(3)]:
            result.result(WAIT_S)


def test_a_group_that_another_forward_runs_is_progress() -> None:
    """A long computation in one thread is not a stall of another that waits for its slots."""
    clock = Clock()
    with running(slots=1, stall_timeout_s=1.0, clock=clock) as (engine, _), ThreadPoolExecutor(1) as thread:
        with engine.visit(0, [0, 1]) as layer_visit:
            groups = layer_visit.groups()
            next(groups)
            waiting = thread.submit(visit, engine, 1, [2])
            until(lambda: engine.waiters)
            clock.advance(engine, 0.6)
            next(groups)
            clock.advance(engine, 0.6)
            assert not waiting.done()
            assert list(groups) == []
        assert waiting.result(WAIT_S) == [2]
