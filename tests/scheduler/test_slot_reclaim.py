"""Whose slot is freed, depending on who asks for it and who wants the expert that has it."""

from __future__ import annotations

import numpy as np

from promoe.scheduler.cache import DRAINING, LOADING, RESIDENT, ExpertCache, Load
from promoe.scheduler.eviction import Static
from promoe.scheduler.slot_reclaim import HINT, PIN, SPECULATION, SlotReclaimer
from promoe.scheduler.speculation import Speculation
from promoe.scheduler.waste import FetchedBytes, WasteBudget

from .simulated import Tally

NUM_EXPERTS = 40


class Pool:
    """One layer's pool, with a popularity that falls with the expert's number: the largest number goes first."""

    def __init__(self, num_slots: int) -> None:
        self.cache = ExpertCache(num_slots, NUM_EXPERTS)
        self.eviction = Static(1, NUM_EXPERTS)
        self.eviction.fix(-np.arange(NUM_EXPERTS, dtype=float).reshape(1, -1))
        self.hinted: dict[int, set[int]] = {}
        self.speculation = Speculation()
        self.tally = Tally()
        self.fetched = FetchedBytes(self.tally, WasteBudget(0.5, 0.025, 1000))
        self.reclaimer = SlotReclaimer(
            self.cache, NUM_EXPERTS, self.eviction, self.hinted, self.speculation, self.fetched
        )

    def resident(self, *codes: int) -> Pool:
        for code in codes:
            load = self.cache.start_load(code, 1)
            load.issued, load.done_bytes = 1, 10
            self.cache.finish_load(code)
        return self

    def paused(self, code: int, done_bytes: int = 10) -> Pool:
        load = self.cache.start_load(code, 3)
        load.issued, load.done_bytes = 1, done_bytes
        return self

    def moving(self, code: int, issued: int = 1) -> Load:
        load = self.cache.start_load(code, 3)
        load.issued = issued
        load.pending = {issued - 1}
        return load

    def wish(self, *codes: int) -> Pool:
        self.speculation.replace(0, 5, [(code, 0.9) for code in codes])
        return self

    def hint(self, *codes: int) -> Pool:
        self.hinted[0] = set(codes)
        return self

    def pin(self, *codes: int) -> Pool:
        for code in codes:
            self.cache.pin(code)
        return self

    def make(self, code: int, level: int) -> bool:
        made = self.reclaimer.free_a_slot(code, level, 0)
        assert made == (self.cache.num_free > 0)
        self.cache.check_integrity()
        return made

    @property
    def here(self) -> set[int]:
        return {code for code in range(NUM_EXPERTS) if self.cache.state[code] in (LOADING, RESIDENT)}


def test_a_free_slot_costs_nobody_anything() -> None:
    pool = Pool(2).resident(3)
    assert pool.make(5, SPECULATION)
    assert pool.here == {3}


def test_the_largest_score_goes() -> None:
    pool = Pool(3).resident(3, 9, 6)
    assert pool.make(1, PIN)
    assert pool.here == {3, 6}
    assert pool.tally.evictions == 1


def test_a_paused_transfer_that_nobody_wants_goes_before_any_resident() -> None:
    pool = Pool(3).resident(9).paused(2, done_bytes=20).paused(4)
    assert pool.make(1, SPECULATION)
    assert pool.here == {9, 2}  # the one with less done


def test_demand_drops_a_resident_before_a_wanted_transfer_and_that_before_nothing() -> None:
    pool = Pool(2).resident(9).paused(2).wish(2)
    assert pool.make(1, PIN)
    assert pool.here == {2}
    pool = Pool(2).resident(9).paused(2).wish(2).pin(9)
    assert pool.make(1, PIN)
    assert pool.here == {9}


def test_speculation_takes_only_from_what_is_needed_later() -> None:
    pool = Pool(1).resident(6)
    assert not pool.make(7, SPECULATION)
    assert pool.here == {6}
    assert pool.make(5, SPECULATION)


def test_speculation_takes_no_wanted_transfer() -> None:
    pool = Pool(1).paused(6).wish(6)
    assert not pool.make(1, SPECULATION)
    assert pool.make(1, HINT)


def test_a_hint_takes_no_hinted_expert() -> None:
    pool = Pool(2).resident(6).paused(7).hint(6, 7)
    assert not pool.make(1, HINT)
    assert not pool.make(1, SPECULATION)
    assert pool.here == {6, 7}


def test_demand_takes_hinted_experts_last() -> None:
    pool = Pool(3).resident(9, 3).paused(7).hint(9, 7)
    gone = []
    for code in (30, 31, 32):
        before = pool.here
        assert pool.make(code, PIN)
        gone += before - pool.here
        pool.resident(code).pin(code)
    assert gone == [3, 7, 9]


def test_a_pinned_expert_never_goes() -> None:
    pool = Pool(2).resident(6, 7).pin(6, 7)
    for level in (SPECULATION, HINT, PIN):
        assert not pool.make(1, level)
    assert pool.here == {6, 7}


def test_a_pin_that_comes_after_the_look_protects() -> None:
    pool = Pool(4).resident(6, 7, 8, 9)
    assert pool.make(1, PIN)
    assert 9 not in pool.here
    pool.resident(1).pin(8)  # no layer event between
    assert pool.make(2, PIN)
    assert pool.here == {1, 6, 8}


def test_demand_stops_a_transfer_when_nothing_can_be_dropped_at_once() -> None:
    pool = Pool(2)
    pool.moving(6, issued=2)
    load = pool.moving(7)
    pool.pin(1)  # waits for a slot
    assert not pool.make(1, PIN)
    assert pool.cache.state[7] == DRAINING  # the one with less sent
    assert pool.cache.state[6] == LOADING
    # One slot is on its way to one that waits: no further transfer is stopped for it.
    assert not pool.make(1, PIN)
    assert pool.cache.state[6] == LOADING
    load.pending.clear()
    pool.cache.settle(7)
    assert pool.make(1, PIN)


def test_as_many_transfers_are_stopped_as_experts_wait() -> None:
    pool = Pool(3)
    for code in (6, 7, 8):
        pool.moving(code)
    pool.pin(1, 2)
    for code in (1, 2, 1, 2):
        assert not pool.make(code, PIN)
    assert sorted(pool.cache.states[[6, 7, 8]]) == [LOADING, DRAINING, DRAINING]


def test_what_is_hinted_is_stopped_last() -> None:
    pool = Pool(3).hint(6).wish(7)
    pool.moving(6)
    pool.moving(7)
    pool.moving(8, issued=3)
    for num_waiting, stopped in ((1, 8), (2, 7), (3, 6)):
        pool.pin(num_waiting)
        assert not pool.make(num_waiting, PIN)
        assert pool.cache.state[stopped] == DRAINING
        assert int(np.count_nonzero(pool.cache.states == DRAINING)) == num_waiting


def test_a_stopped_transfers_bytes_are_wasted() -> None:
    pool = Pool(1).paused(6).wish(6)
    pool.fetched.arrived(0, 6, "prefetch", 10, pinned=False)
    assert pool.make(1, PIN)
    assert pool.tally.wasted_bytes == {"prefetch": 10}
    assert pool.tally.evictions == 0  # it was never complete


def test_the_order_of_victims_is_kept_until_a_layer_event() -> None:
    pool = Pool(3).resident(6, 7, 8)
    assert pool.make(1, PIN)
    pool.resident(1)
    pool.eviction.fix(np.arange(NUM_EXPERTS, dtype=float).reshape(1, -1))
    assert pool.make(2, PIN)
    assert pool.here == {1, 6}  # still by the old scores
    pool.resident(2)
    pool.reclaimer.invalidate()
    assert pool.make(3, PIN)
    assert pool.here == {2, 6}


def test_many_victims_of_one_event_go_in_order_of_their_scores() -> None:
    num_slots = 20
    pool = Pool(num_slots).resident(*range(num_slots))
    gone = []
    for code in range(num_slots, 2 * num_slots):
        before = pool.here
        assert pool.make(code, PIN)
        gone += before - pool.here
        pool.resident(code).pin(code)
    assert gone == list(range(num_slots - 1, -1, -1))


def test_spare_slots_are_neither_pinned_nor_waiting_for_a_chunk() -> None:
    pool = Pool(6).resident(1, 2).paused(3).pin(1, 30)
    pool.moving(4)
    # Of six: two pinned (one of them still without a slot), one in flight.
    assert pool.reclaimer.spare_slots() == 3
