"""A replay on demand only: what a cache would have held, and the bytes that it would have fetched."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler import PoolSpec, Scheduler, SchedulerConfig
from promoe.scheduler.replay import Replay
from promoe.scheduler.reuse import LearnedReuse


def replay_of(num_slots: int, num_layers: int = 1) -> Replay:
    return Replay(
        SchedulerConfig([4] * num_layers, [(7, 3)] * num_layers, [PoolSpec(num_slots, tuple(range(num_layers)))], "lru")
    )


def test_what_is_held_costs_nothing() -> None:
    replay = replay_of(2)
    assert [replay.visit(0, [[expert_idx]]) for expert_idx in (0, 1, 0, 2, 0, 1)] == [10, 10, 0, 10, 0, 10]
    assert replay.residency(0).tolist() == [True, True, False, False]


def test_a_layer_that_needs_more_than_there_are_slots_runs_in_waves() -> None:
    replay = replay_of(2)
    assert replay.visit(0, [[0, 1], [2, 3]]) == 40
    assert replay.residency(0).sum() == 2


def test_layers_share_the_pool_and_are_told_apart() -> None:
    replay = replay_of(2, num_layers=2)
    assert replay.visit(0, [[1]]) + replay.visit(1, [[3]]) == 20
    assert replay.residency(0).tolist() == [False, True, False, False]
    assert replay.residency(1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("switch", ["prefetch", "hints"])
def test_it_neither_prefetches_nor_hints(switch: str) -> None:
    assert not getattr(replay_of(2)._scheduler.config, switch)


def test_it_keeps_what_is_foreseen_to_be_used_again() -> None:
    nothing = LearnedReuse.foreseeing(np.zeros((1, 4), dtype=np.float32), weight=2.0)
    for kept, log_odds in ((0, [3.0, -3.0, 0.0, 0.0]), (1, [-3.0, 3.0, 0.0, 0.0])):
        replay = Replay(SchedulerConfig([4], [(10,)], [PoolSpec(2, (0,))]), nothing)
        replay.visit(0, [[0, 1]])
        replay.foresee_reuse(0, log_odds)
        assert replay.visit(0, [[2]]) == 10
        assert replay.residency(0).nonzero()[0].tolist() == [kept, 2]


def test_beside_a_system_that_is_shown_each_visit_first_it_finds_the_same() -> None:
    rng = np.random.default_rng(0)
    config = SchedulerConfig([16] * 3, [(7, 3)] * 3, [PoolSpec(12, (0, 1, 2))])
    system = Scheduler(config)
    apart, beside = Replay(config), Replay(config, taught=system)
    for turn in range(600):
        layer_idx, ids = turn % 3, rng.permutation(16)[:2].tolist()
        system.hint(layer_idx, ids)
        system.begin_visit(layer_idx, ids).close()
        assert apart.visit(layer_idx, [ids]) == beside.visit(layer_idx, [ids])
        assert (apart.residency(layer_idx) == beside.residency(layer_idx)).all()
