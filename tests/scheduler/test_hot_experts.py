"""Layers with experts of two kinds: each kind has chunks and a pool of its own, and visits need both."""

from __future__ import annotations

import pytest

from promoe.scheduler import ExpertKey, HotExperts, PoolSpec, SchedulerConfig
from promoe.scheduler.replay import Replay

from .by_hand import certain, config, fetch, finish, names
from .driven import Driven

# Experts 0 and 1 of each layer.
KEYS = frozenset(ExpertKey(layer_idx, expert_idx) for layer_idx in range(2) for expert_idx in range(2))
HOT = HotExperts(KEYS, [(20, 20, 20)] * 2)


def driven(num_slots: int, num_hot_slots: int, **fields: object) -> Driven:
    pools = [PoolSpec(num_slots, (0, 1)), PoolSpec(num_hot_slots, (0, 1), hot=True)]
    return Driven(config(pools=pools, hot=HOT, **fields))  # type: ignore[arg-type]


def test_each_kind_has_its_own_sizes() -> None:
    sizes = driven(2, 2).config
    assert sizes.chunk_bytes_of(ExpertKey(0, 1)) == (20, 20, 20)
    assert sizes.chunk_bytes_of(ExpertKey(0, 2)) == (10, 10)
    assert sizes.expert_bytes == ((2 * 60 + 6 * 20) // 8,) * 2
    begun = config(pools=[*sizes.pools], hot=HotExperts(KEYS, HOT.chunk_bytes, (2, 1)), first_chunks=(1, 0))
    assert [begun.first_chunks_of(ExpertKey(layer, idx)) for layer in (0, 1) for idx in (0, 7)] == [2, 1, 1, 0]


@pytest.mark.parametrize(
    ("hot", "pools"),
    [
        (HOT, [PoolSpec(1, (0, 1))]),
        (None, [PoolSpec(1, (0, 1)), PoolSpec(1, (0, 1), hot=True)]),
        (HOT, [PoolSpec(1, (0, 1)), PoolSpec(1, (0,), hot=True)]),
        (HotExperts(frozenset(key for key in KEYS if not key.layer_idx), HOT.chunk_bytes), None),
        (HotExperts(frozenset(ExpertKey(layer, idx) for layer in (0, 1) for idx in range(8)), HOT.chunk_bytes), None),
        (HotExperts(KEYS | {ExpertKey(0, 8)}, HOT.chunk_bytes), None),
        (HotExperts(KEYS, [(20,)]), None),
        (HotExperts(KEYS, HOT.chunk_bytes, (3, 0)), None),
    ],
    ids=["no pool", "none", "layer left out", "layer without", "all", "no such expert", "lengths differ", "all first"],
)
def test_what_does_not_fit_is_refused(hot: HotExperts | None, pools: list[PoolSpec] | None) -> None:
    with pytest.raises(AssertionError):
        config(pools=pools or [PoolSpec(1, (0, 1)), PoolSpec(1, (0, 1), hot=True)], hot=hot)


def test_a_visit_is_granted_what_each_pool_has_slots_for() -> None:
    run = driven(2, 1)
    opened = run.begin(0, [0, 1, 2, 3, 4])
    assert run.admit(opened) == 3
    leases = run.issue(99)
    assert names(leases) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1)]
    finish(run, leases)
    assert run.tally.moved_bytes == 60 + 2 * 20
    assert opened.visit.ready() == [0, 2, 3]
    run.run_group(opened)
    assert run.admit(opened) == 2
    finish(run, run.issue(99))
    assert opened.visit.ready() == [1, 4]
    assert run.tally.moved_bytes == 2 * 60 + 3 * 20


def test_an_expert_makes_room_for_its_own_kind_only() -> None:
    run = driven(2, 1)
    fetch(run, (0, 0), (0, 2), (0, 3))
    assert run.scheduler.resident() == [(0, 0), (0, 2), (0, 3)]
    fetch(run, (1, 1))
    assert run.scheduler.resident() == [(0, 2), (0, 3), (1, 1)]
    assert run.tally.evictions == 1


def test_speculation_leaves_each_pool_a_slot() -> None:
    run = driven(3, 1)
    run.forecast(1, 0, certain(0, 2, 3, 4))
    leases = run.issue(99)
    assert {lease.key.expert_idx for lease in leases} == {2, 3}
    finish(run, leases)
    assert run.scheduler.hint(0, [0, 2]) == 1


def test_in_order_of_id_one_missing_expert_is_fetched_at_a_time() -> None:
    run = driven(1, 1, reorder=False)
    opened = run.begin(0, [1, 2])
    order = []
    while not opened.visit.finished:
        run.admit(opened)
        finish(run, run.issue(99))
        order += opened.visit.ready()
        run.run_group(opened)
    assert order == [1, 2]


def test_pools_are_resized_apart() -> None:
    run = driven(3, 2)
    fetch(run, (0, 0), (0, 1), (0, 2), (0, 3), (0, 4))
    run.resize(1, 1)
    assert len(run.scheduler.resident()) == 4
    run.resize(0, 1)
    assert len(run.scheduler.resident()) == 2
    run.resize(1, 3)
    fetch(run, (1, 0), (1, 1))
    assert sum(key.expert_idx < 2 for key in run.scheduler.resident()) == 3


def test_a_replay_counts_the_bytes_of_each_kind() -> None:
    replay = Replay(
        SchedulerConfig(
            [4], [(7, 3)], [PoolSpec(1, (0,)), PoolSpec(1, (0,), hot=True)], "lru", hot=HotExperts(_one(), [(100,)])
        )
    )
    assert [replay.visit(0, [[0, expert_idx]]) for expert_idx in (1, 1, 2)] == [110, 0, 10]
    assert replay.residency(0).tolist() == [True, False, True, False]


def _one() -> frozenset[ExpertKey]:
    return frozenset([ExpertKey(0, 0)])
