"""Cases worked by hand: what is fetched first, and which slot it takes."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler import ExpertKey, PoolSpec, Scheduler, SchedulerConfig

from .by_hand import certain, config, driven, fetch, finish, names
from .driven import Driven
from .simulated import Tally


def test_demand_goes_before_hints_and_hints_before_speculation() -> None:
    run = driven(num_slots=8, num_layers=3)
    run.forecast(2, 2, certain(5))
    run.hint(1, [3])
    run.admit(run.begin(0, [1, 2]))
    order = names(run.issue(99))
    assert order == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 3, 0), (1, 3, 1), (2, 5, 0), (2, 5, 1)]
    assert run.causes == {"demand": 6, "prefetch": 2}


def transfer(scheduler: Scheduler, count: int = 2) -> tuple[int, int, int, int]:
    """(layer, expert, first chunk, chunks) of the next transfer."""
    lease = scheduler.next_transfer(count)
    assert lease is not None
    scheduler.check_integrity()
    return (*lease.key, lease.chunk_idx, lease.num_chunks)


def test_what_is_certain_to_follow_is_one_transfer() -> None:
    scheduler = Scheduler(config(num_slots=8, num_layers=3, num_chunks=3))
    scheduler.forecast(2, 2, certain(5))
    scheduler.hint(0, [1, 2])
    assert transfer(scheduler, 2) == (0, 1, 0, 2)  # a hint: what is sent now
    scheduler.begin_visit(0, [1, 2]).admit()
    assert [transfer(scheduler) for _ in range(2)] == [(0, 1, 2, 1), (0, 2, 0, 3)]  # pinned: all that is left
    assert [transfer(scheduler) for _ in range(3)] == [(2, 5, n, 1) for n in range(3)]  # may be withdrawn
    assert scheduler.next_transfer(2) is None


def test_a_transfer_is_done_once_with_all_its_bytes() -> None:
    tally = Tally()
    scheduler = Scheduler(config(num_chunks=3), tally)
    scheduler.begin_visit(0, [1]).admit()
    lease = scheduler.next_transfer(1)
    assert lease is not None
    assert tally.moved_bytes == 0
    assert scheduler.chunk_done(lease)
    assert tally.moved_bytes == 30
    assert scheduler.is_resident(0, 1)


def test_all_demand_at_once_is_one_transfer_per_expert() -> None:
    scheduler = Scheduler(config(num_slots=8, num_layers=3, num_chunks=3))
    scheduler.forecast(2, 2, certain(5))
    scheduler.hint(1, [4])
    scheduler.begin_visit(0, [1, 2]).admit()
    leases = scheduler.next_demand()
    assert [(*lease.key, lease.chunk_idx, lease.num_chunks) for lease in leases] == [
        (0, 1, 0, 3),
        (0, 2, 0, 3),
        (1, 4, 0, 3),
    ]
    scheduler.check_integrity()
    assert scheduler.next_demand() == []
    assert all(scheduler.chunk_done(lease) for lease in leases)
    assert [scheduler.is_resident(*lease.key) for lease in leases] == [True] * 3
    assert transfer(scheduler) == (2, 5, 0, 1), "speculation is no demand"


def test_all_demand_at_once_is_what_has_slots() -> None:
    scheduler = Scheduler(config(num_slots=2, num_layers=3, num_chunks=3))
    visit = scheduler.begin_visit(0, [1, 2, 3])
    visit.admit()
    leases = scheduler.next_demand()
    assert [lease.key.expert_idx for lease in leases] == [1, 2]
    for lease in leases:
        scheduler.chunk_done(lease)
    visit.release([1, 2])
    visit.admit()
    assert [lease.key.expert_idx for lease in scheduler.next_demand()] == [3]


def test_behind_one_that_waits_for_its_slot_chunks_go_one_by_one() -> None:
    """Of two slots, one has an unfinished hint, and the other is being loaded with an expert that nobody will use."""
    scheduler = Scheduler(config(num_slots=2, num_layers=3, num_chunks=3))
    scheduler.hint(2, [3])
    scheduler.next_chunks(1)
    scheduler.hint(2, [])
    scheduler.hint(1, [0])
    useless = scheduler.next_chunks(3)
    scheduler.begin_visit(0, [2]).admit()
    scheduler.begin_visit(2, [3]).admit()
    assert transfer(scheduler) == (2, 3, 1, 1)
    for lease in useless:
        scheduler.chunk_done(lease)
    assert [transfer(scheduler) for _ in range(2)] == [(0, 2, 0, 3), (2, 3, 2, 1)]


def test_next_chunks_gives_no_more_than_asked_for() -> None:
    run = driven()
    run.admit(run.begin(0, [1, 2]))
    assert len(run.scheduler.next_chunks(3)) == 3
    assert len(run.scheduler.next_chunks(3)) == 1
    assert run.scheduler.next_chunks(3) == []


def test_demand_preempts_speculation_between_chunks() -> None:
    run = driven(num_chunks=3)
    run.forecast(1, 1, certain(5))
    first = run.issue(1)
    assert names(first) == [(1, 5, 0)]
    run.admit(run.begin(0, [2]))
    assert names(run.issue(99)) == [(0, 2, 0), (0, 2, 1), (0, 2, 2), (1, 5, 1), (1, 5, 2)]


def test_a_hint_preempts_speculation_between_chunks() -> None:
    run = driven(num_chunks=2)
    run.forecast(2, 1, certain(5))
    assert names(run.issue(1)) == [(1, 5, 0)]
    run.hint(0, [2])
    assert names(run.issue(2)) == [(0, 2, 0), (0, 2, 1)]


def test_speculation_goes_by_deadline_then_probability() -> None:
    run = driven(num_slots=8, num_layers=4, num_chunks=1)
    later, sooner = np.zeros(8), np.zeros(8)
    later[[0, 1]] = 0.9, 0.99
    sooner[[2, 3, 4]] = 0.6, 0.8, 0.4
    run.forecast(3, 2, later)
    run.forecast(2, 1, sooner)
    # Expert 4 is below `min_probability`.
    assert names(run.issue(99)) == [(1, 3, 0), (1, 2, 0), (2, 1, 0), (2, 0, 0)]


def test_a_new_forecast_reorders_and_withdraws() -> None:
    run = driven(num_slots=8, num_layers=3, num_chunks=2)
    run.forecast(2, 2, certain(5, 6))
    begun = run.issue(1)
    run.forecast(1, 2, certain(6, 7))
    assert names(run.issue(99)) == [(2, 6, 0), (2, 6, 1), (2, 7, 0), (2, 7, 1)]
    finish(run, begun)
    # What was fetched of the withdrawn expert stays: nobody needs its slot yet, and nothing of it is sent again.
    run.forecast(1, 2, certain(5))
    assert names(run.issue(99)) == [(2, 5, 1)]


def test_resident_experts_run_first_then_those_on_their_way() -> None:
    run = driven(num_slots=6, num_chunks=3)
    fetch(run, (0, 7))
    run.forecast(1, 0, certain(5))
    finish(run, run.issue(2))
    run.forecast(1, 0, certain(4, 5))
    opened = run.begin(0, [1, 4, 5, 7])
    assert run.admit(opened) == 4
    assert opened.visit.ready() == [7]
    assert names(run.issue(99)) == [(0, 5, 2), *[(0, 1, c) for c in range(3)], *[(0, 4, c) for c in range(3)]]


def test_a_partial_load_is_resumed_not_restarted() -> None:
    run = driven(num_chunks=3)
    run.forecast(1, 0, certain(5))
    finish(run, run.issue(2))
    opened = run.begin(0, [5])
    run.admit(opened)
    last = run.issue(99)
    assert names(last) == [(0, 5, 2)]
    assert last[0].cause == "demand"
    finish(run, last)
    assert opened.visit.ready() == [5]
    assert run.tally.moved == {"prefetch": 20, "demand": 10}
    assert run.tally.used == 20


def test_speculation_in_flight_becomes_demand_when_its_visit_comes() -> None:
    run = driven(num_chunks=1)
    run.forecast(1, 0, certain(5))
    (lease,) = run.issue(99)
    opened = run.begin(0, [5])
    run.admit(opened)
    assert run.issue(99) == []  # all of it is on its way already
    run.complete(lease)
    assert opened.visit.ready() == [5]
    assert run.tally.used == 10


def test_without_reordering_experts_are_fetched_in_turn() -> None:
    run = driven(num_slots=4, num_chunks=1, reorder=False)
    fetch(run, (0, 1), (0, 5))
    opened = run.begin(0, [5, 3, 1, 2])
    assert run.admit(opened) == 2  # expert 1, there, and expert 2, the first that is missing
    assert opened.visit.ready() == [1]
    assert names(run.issue(99)) == [(0, 2, 0)]
    run.run_group(opened)
    assert run.admit(opened) == 0
    finish(run, run.outstanding[:])
    run.run_group(opened)
    assert run.admit(opened) == 1
    assert names(run.issue(99)) == [(0, 3, 0)]


# -- slots -----------------------------------------------------------------------------------------------------------


def test_waves_when_experts_exceed_slots() -> None:
    run = driven(num_slots=2, num_chunks=1)
    opened = run.begin(0, [0, 1, 2, 3, 4])
    sizes = []
    while not opened.visit.finished:
        run.admit(opened)
        finish(run, run.issue(99))
        sizes.append(run.run_group(opened))
    assert sizes == [2, 2, 1]
    assert run.tally.moved == {"demand": 50}
    assert run.tally.evictions == 3


def test_one_slot_serves_three_visits() -> None:
    run = driven(num_slots=1, num_chunks=2)
    for layer_idx in (0, 1, 0):
        run.begin(layer_idx, [1, 2, 3])
    run.end_all()
    assert run.tally.moved["demand"] >= 6 * 20


def test_speculation_leaves_the_last_slot_to_demand() -> None:
    run = driven(num_slots=3, num_chunks=1)
    run.forecast(1, 1, certain(0, 1, 2, 3))
    assert names(run.issue(99)) == [(1, 0, 0), (1, 1, 0)]
    opened = run.begin(0, [5])
    run.admit(opened)
    assert names(run.issue(99)) == [(0, 5, 0)]


def test_demand_takes_the_slot_of_paused_speculation() -> None:
    run = driven(num_slots=2, num_chunks=2)
    run.forecast(1, 1, certain(3))
    finish(run, run.issue(1))
    run.admit(run.begin(0, [1, 2]))
    assert names(run.issue(99)) == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    assert run.tally.wasted_bytes == {"prefetch": 10}


def test_demand_waits_for_speculation_in_flight_and_then_has_its_slot() -> None:
    run = driven(num_slots=2, num_chunks=2)
    run.forecast(1, 1, certain(3))
    (late,) = run.issue(1)
    run.admit(run.begin(0, [1, 2]))
    assert names(run.issue(99)) == [(0, 1, 0), (0, 1, 1)]
    run.complete(late)
    issued = run.issue(99)
    assert names(issued) == [(0, 2, 0), (0, 2, 1)]
    assert issued[0].slot == late.slot
    assert issued[0].generation == late.generation + 1
    assert run.tally.wasted_bytes == {"prefetch": 10}


def test_speculation_spares_an_expert_that_is_needed_sooner() -> None:
    run = driven(num_slots=2, num_layers=4, num_chunks=1)
    fetch(run, (1, 0), (2, 0))  # next visit: layer 3; layers 1 and 2 are two and three steps away
    run.forecast(2, 1, certain(0))
    run.forecast(3, 2, certain(0))
    run.forecast(3, 2, certain(0, 4))  # expert 4 would be needed no sooner than either
    assert run.issue(99) == []
    run.forecast(1, 3, certain(1))  # this one would
    assert names(run.issue(99)) == [(3, 1, 0)]
    assert run.scheduler.resident() == [ExpertKey(1, 0)]


def test_a_hint_evicts_no_hinted_expert() -> None:
    run = driven(num_slots=2, num_chunks=1, eviction="lru")
    fetch(run, (0, 0), (0, 1))
    run.hint(0, [0, 1])
    run.hint(1, [2])
    assert run.issue(99) == []
    # But the visit that follows may.
    run.admit(run.begin(1, [2]))
    assert names(run.issue(99)) == [(1, 2, 0)]


def test_pools_share_nothing() -> None:
    run = driven(num_chunks=1, pools=[PoolSpec(1, (0,)), PoolSpec(2, (1,))], eviction="lru")
    fetch(run, (0, 1), (1, 1), (1, 2), (0, 3))
    assert run.scheduler.resident() == [ExpertKey(0, 3), ExpertKey(1, 1), ExpertKey(1, 2)]
    assert run.tally.evictions == 1


def test_one_pool_is_shared_by_its_layers() -> None:
    run = driven(num_slots=3, num_chunks=1, eviction="lru")
    fetch(run, (0, 1), (1, 1), (1, 2), (0, 3))
    assert run.scheduler.resident() == [ExpertKey(0, 3), ExpertKey(1, 1), ExpertKey(1, 2)]


def test_layers_may_differ_in_experts_and_chunks() -> None:
    run = Driven(SchedulerConfig([2, 5], [(7,), (3, 4)], [PoolSpec(3, (0, 1))], calibrate=False, strict=True))
    run.forecast(2, 1, [0, 0, 0, 0, 1])
    run.admit(run.begin(0, [1]))
    leases = run.issue(99)
    assert names(leases) == [(0, 1, 0), (1, 4, 0), (1, 4, 1)]
    finish(run, leases)
    assert run.tally.moved == {"demand": 7, "prefetch": 7}
    assert run.scheduler.resident() == [ExpertKey(0, 1), ExpertKey(1, 4)]


# -- free slots, and integrity ---------------------------------------------------------------------------------------


def test_warm_fills_free_slots_in_order_and_evicts_nothing() -> None:
    run = driven(num_slots=3, num_chunks=2)
    fetch(run, (0, 1))
    run.warm([ExpertKey(1, 4), ExpertKey(0, 1), ExpertKey(1, 5), ExpertKey(1, 6)])
    assert run.scheduler.has_orders
    leases = run.issue(99)
    assert names(leases) == [(1, 4, 0), (1, 4, 1), (1, 5, 0), (1, 5, 1)]
    assert run.scheduler.warming
    finish(run, leases)
    assert not run.scheduler.warming
    assert not run.scheduler.has_orders
    assert run.scheduler.resident() == [ExpertKey(0, 1), ExpertKey(1, 4), ExpertKey(1, 5)]


def test_what_is_needed_goes_before_what_warms() -> None:
    run = driven(num_slots=4, num_chunks=2)
    run.warm([ExpertKey(1, 4), ExpertKey(1, 5)])
    first = run.issue(1)
    run.forecast(1, 1, certain(6))
    run.hint(0, [2])
    assert names([*first, *run.issue(99)]) == [
        *((1, 4, 0), (0, 2, 0), (0, 2, 1), (1, 6, 0), (1, 6, 1)),
        *((1, 4, 1), (1, 5, 0), (1, 5, 1)),
    ]


def test_what_could_not_be_fetched_is_not_asked_for_again_by_warming() -> None:
    run = driven(num_slots=4, num_chunks=2)
    run.warm([ExpertKey(1, 4), ExpertKey(1, 5)])
    run.fail(run.issue(1)[0])
    leases = run.issue(99)
    assert names(leases) == [(1, 5, 0), (1, 5, 1)]
    finish(run, leases)
    assert not run.scheduler.warming


def test_another_wish_replaces_what_was_not_sent() -> None:
    run = driven(num_slots=4, num_chunks=1)
    run.warm([ExpertKey(1, 4), ExpertKey(1, 5)])
    (first,) = run.issue(1)
    run.warm([ExpertKey(0, 3)])
    assert names(run.issue(99)) == [(0, 3, 0)]
    assert run.scheduler.warming
    run.warm([])
    finish(run, [first, run.outstanding[-1]])
    assert not run.scheduler.has_orders


def test_without_orders_there_is_nothing_to_send() -> None:
    run = driven(num_chunks=1)
    assert not run.scheduler.has_orders
    run.forecast(1, 0, certain(1))
    assert run.scheduler.has_orders
    finish(run, run.issue(99))
    assert not run.scheduler.has_orders
    run.hint(1, [2])
    assert run.scheduler.has_orders
    finish(run, run.issue(99))
    run.admit(run.begin(0, [3]))
    assert run.scheduler.has_orders


def test_warm_leaves_queued_demand_to_its_visit() -> None:
    run = driven(num_slots=1, num_experts=1, num_chunks=1)
    opened = run.begin(0, [0])
    run.admit(opened)
    run.warm([ExpertKey(0, 0)])
    (lease,) = run.issue(99)
    run.complete(lease)
    assert opened.visit.ready() == [0]


def test_integrity_errors_name_the_numbers() -> None:
    run = driven()
    run.scheduler.caches[0]._free.pop()
    with pytest.raises(AssertionError, match=r"free, loading, draining, resident, slots = \(3, 0, 0, 0, 4\)"):
        run.scheduler.check_integrity()


def test_integrity_finds_a_pinned_expert_that_nobody_will_fetch() -> None:
    run = driven()
    run.admit(run.begin(0, [1]))
    run.scheduler._demand.clear()
    with pytest.raises(AssertionError, match="is pinned; resident, failed, coming"):
        run.scheduler.check_integrity()
