"""Resizing the slot pools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import WAIT_S, settle, until

from promoe.errors import (
    ConfigError,
    EngineClosedError,
    PatchStateError,
)
from promoe.scheduler import ExpertKey, PoolSpec

from .engines import EXPERTS, LAYERS, Recording, resident, running, visit


def test_what_stays_is_not_fetched_again() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1, 2, 3, 4])
        link.started.clear()
        engine.resize([6])
        assert visit(engine, 0, [1, 2, 3, 4]) == [1, 2, 3, 4]
        assert link.started == []
        visit(engine, 1, [0, 5])
        assert resident(engine) == {(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 5)}
        engine.resize([3])  # LRU: of two used at once the later one, and those of the last visit
        assert resident(engine) == {(0, 4), (1, 0), (1, 5)}
        link.started.clear()
        assert visit(engine, 1, [0, 5]) == [0, 5]
        assert visit(engine, 0, [4]) == [4]
        assert link.started == []
        engine.resize([1])
        for layer_idx in range(LAYERS):
            assert len(visit(engine, layer_idx, list(range(EXPERTS)))) == EXPERTS
        engine.resize([1])
        assert engine.pools[0].num_slots == 1


def test_what_is_in_flight_lands_first_and_nothing_is_sent_meanwhile() -> None:
    held = lambda key, idx: idx == 1  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=4) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        engine.hint(0, [2, 3])
        until(lambda: (ExpertKey(0, 2), 1) in link.started)
        resizing = thread.submit(engine.resize, [2])
        until(lambda: engine.waiters)
        with pytest.raises(PatchStateError, match="by another thread"):
            engine.resize([3])
        link.open.set()
        resizing.result(WAIT_S)
        assert engine.pools[0].num_slots == 2
        assert engine.waiters == []
        settle(engine)
        assert link.started == [(ExpertKey(0, 2), 0), (ExpertKey(0, 2), 1)]
        assert visit(engine, 0, [2, 3]) == [2, 3]


def test_in_the_midst_of_a_visit_it_is_refused_and_nothing_changes() -> None:
    with running(slots=4) as (engine, _):
        with engine.visit(0, [1, 2]) as layer_visit:
            for _ in layer_visit.groups():
                with pytest.raises(PatchStateError, match="while a forward of the model uses it"):
                    engine.resize([2])
        assert engine.pools[0].num_slots == 4
        assert visit(engine, 0, [1, 2, 3]) == [1, 2, 3]


def test_without_memory_for_more_slots_it_goes_on_as_before() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1, 2])
        with pytest.raises(ConfigError, match="Choose a smaller cache"):
            engine.resize([2**50])
        link.started.clear()
        assert visit(engine, 0, [1, 2]) == [1, 2]
        assert link.started == []


def test_of_several_pools_none_is_changed_if_one_cannot_grow() -> None:
    with running(pools=[PoolSpec(2, (0,)), PoolSpec(3, (1, 2))]) as (engine, link):
        visit(engine, 0, [1, 2])
        with pytest.raises(ConfigError, match="Choose a smaller cache"):
            engine.resize([1, 2**50])
        assert [pool.num_slots for pool in engine.pools] == [2, 3]
        link.started.clear()
        assert visit(engine, 0, [1, 2]) == [1, 2]
        assert link.started == []
        engine.resize([1, 4])
        assert [pool.num_slots for pool in engine.pools] == [1, 4]


def test_a_closed_engine_is_not_resized() -> None:
    with running() as (engine, _):
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.resize([2])
