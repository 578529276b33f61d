"""The scheduler on cases worked by hand: who is fetched first, who makes room, and what becomes of a failure."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler import ExpertKey, Lease, PoolSpec, Scheduler, SchedulerConfig
from promoe.scheduler.calibration import START_COEFFICIENTS
from promoe.scheduler.reuse import LearnedReuse

from .driven import Driven
from .replay import Tally


def config(
    num_slots: int = 4,
    num_layers: int = 2,
    num_experts: int = 8,
    num_chunks: int = 2,
    pools: list[PoolSpec] | None = None,
    **switches: object,
) -> SchedulerConfig:
    fields: dict[str, object] = {"calibrate": False, "strict": True, **switches}
    return SchedulerConfig(
        num_experts=[num_experts] * num_layers,
        chunk_bytes=[(10,) * num_chunks] * num_layers,
        pools=pools or [PoolSpec(num_slots, tuple(range(num_layers)))],
        **fields,  # type: ignore[arg-type]
    )


def driven(**fields: object) -> Driven:
    return Driven(config(**fields))  # type: ignore[arg-type]


def certain(*ids: int, num_experts: int = 8) -> np.ndarray:
    p = np.zeros(num_experts)
    p[list(ids)] = 1.0
    return p


def names(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(layer, expert, chunk) of each lease."""
    return [(*lease.key, lease.chunk_idx) for lease in leases]


def fetch(run: Driven, *keys: tuple[int, int]) -> None:
    """Bring experts in, by a visit each, and let go of them."""
    for layer_idx, expert_idx in keys:
        opened = run.begin(layer_idx, [expert_idx])
        run.admit(opened)
        while not opened.visit.ready():
            for lease in run.issue():
                run.complete(lease)
        run.run_group(opened)
        run.close(opened)


def finish(run: Driven, leases: list[Lease]) -> None:
    for lease in leases:
        run.complete(lease)


# -- the order of fetching ------------------------------------------------------------------------------------------


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
    """Of two slots one is an unfinished hint's, the other in flight to an expert that nobody will use."""
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


# -- room -----------------------------------------------------------------------------------------------------------


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


# -- hints ----------------------------------------------------------------------------------------------------------


def test_a_hint_counts_what_is_there() -> None:
    run = driven()
    fetch(run, (0, 1))
    assert run.scheduler.hint(0, [1, 2]) == 1


def test_a_hint_never_followed_by_a_visit_blocks_nothing() -> None:
    run = driven(num_slots=2, num_chunks=2)
    run.hint(0, [0, 1])
    finish(run, run.issue(3))  # expert 0 is there, expert 1 half
    run.admit(run.begin(1, [4, 5]))
    assert names(run.issue(99)) == [(1, 4, 0), (1, 4, 1), (1, 5, 0), (1, 5, 1)]
    run.end_all()
    # The next pass hints the layer again: what the old hint wanted is forgotten.
    run.hint(0, [6])
    assert names(run.issue(99)) == [(0, 6, 0), (0, 6, 1)]


def test_a_repeated_hint_sends_nothing_twice_and_a_changed_one_replaces() -> None:
    run = driven(num_slots=4, num_chunks=2)
    run.hint(0, [1, 2])
    run.issue(1)
    run.hint(0, [1, 2])
    run.hint(0, [3, 1])
    assert names(run.issue(99)) == [(0, 3, 0), (0, 3, 1), (0, 1, 1)]


def test_a_visit_with_other_ids_than_hinted_is_the_authority() -> None:
    run = driven(num_slots=4, num_chunks=1)
    run.hint(0, [1, 2])
    opened = run.begin(0, [3])
    run.admit(opened)
    assert names(run.issue(99)) == [(0, 3, 0)]


def test_a_hint_withdraws_its_layers_speculation() -> None:
    run = driven(num_slots=4, num_chunks=1)
    run.forecast(1, 0, certain(5))
    run.hint(0, [6])
    assert names(run.issue(99)) == [(0, 6, 0)]


def test_without_hints_the_gate_starts_nothing() -> None:
    run = driven(hints=False)
    run.forecast(1, 0, certain(5))
    run.hint(0, [6])
    assert names(run.issue(99)) == [(0, 5, 0), (0, 5, 1)]


# -- forecasts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_ahead", [0, -1, 3])
def test_a_forecast_for_no_coming_visit_is_dropped(steps_ahead: int) -> None:
    run = driven()
    run.forecast(steps_ahead, 0, certain(5))
    assert run.issue(99) == []


def test_a_forecast_after_its_layers_hint_is_dropped() -> None:
    run = driven()
    run.hint(0, [])
    run.forecast(1, 0, certain(5))
    assert run.issue(99) == []
    run.begin(0, [1])
    run.forecast(2, 0, certain(5))  # about the layer's next visit, in the next pass
    assert names(run.issue(1)) == [(0, 5, 0)]


def test_a_visit_withdraws_its_layers_speculation() -> None:
    run = driven(num_slots=4, num_chunks=1)
    run.forecast(1, 0, certain(5, 6))
    run.begin(0, [6])
    assert run.issue(99) == []


def test_a_nan_is_no_forecast() -> None:
    run = driven(num_chunks=1, calibrate=True)
    p = np.full(8, np.nan)
    for _ in range(20):
        run.forecast(1, 0, p)
        run.admit(run.begin(0, [1]))
        run.end_all()
    assert np.isfinite(run.scheduler.calibration.coefficients(0, 1)).all()
    assert np.isfinite(run.scheduler.eviction.scores(0)).all()
    assert run.causes == {"demand": 1}


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_foreseen_not_to_be_used_again_makes_room(begun: bool) -> None:
    """Whatever was used last: the others stay."""
    for victim in (1, 2, 3):
        three_slots = config(num_slots=3, num_chunks=1)
        scheduler = Scheduler(three_slots, reuse=foreseeing_reuse(three_slots))
        fetch_all(scheduler, [1, 2, 3])
        odds = np.full(8, 3.0)
        odds[victim] = -3.0
        scheduler.foresee_reuse(0, odds, begun)
        fetch_all(scheduler, [4])
        kept = {key.expert_idx for key in scheduler.resident()}
        assert kept == {1, 2, 3, 4} - {victim}


def foreseeing_reuse(config: SchedulerConfig) -> LearnedReuse:
    shape = (config.num_layers, max(config.num_experts))
    return LearnedReuse.foreseeing(np.zeros(shape, dtype=np.float32), weight=1.0)


def fetch_all(scheduler: Scheduler, ids: list[int]) -> None:
    """A visit of layer 0 with these experts."""
    visit = scheduler.begin_visit(0, ids)
    visit.admit()
    while lease := scheduler.next_transfer(1):
        scheduler.chunk_done(lease)
    visit.release(visit.ready())
    visit.close()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_foreseen(odd: float) -> None:
    config_ = config(num_chunks=1)
    scheduler = Scheduler(config_, reuse=foreseeing_reuse(config_))
    before = scheduler.eviction.scores(0).copy()
    scheduler.foresee_reuse(0, [odd] + [0.0] * 7, begun=True)
    np.testing.assert_array_equal(scheduler.eviction.scores(0), before)
    scheduler.foresee_reuse(0, [1e30] + [-1e30] * 7, begun=True)
    assert np.isfinite(scheduler.eviction.scores(0)).all()
    with pytest.raises(AssertionError, match="8 experts"):
        scheduler.foresee_reuse(0, [0.0], begun=True)


def test_a_prompt_says_nothing_about_the_worth_of_forecasts() -> None:
    learned = []
    for tokens in ([[1, 2], [3, 4]], [[1, 2]]):
        run = driven(num_slots=8, num_chunks=1, calibrate=True, prefetch=False)
        for _ in range(20):
            run.forecast(1, 0, certain(1))
            ids = sorted({e for chosen in tokens for e in chosen})
            run.admit(run.begin(0, ids, tokens))
            run.end_all()
        learned.append(run.scheduler.calibration.coefficients(0, 1) != START_COEFFICIENTS)
    assert learned == [False, True]


def test_the_layers_next_visit_is_weighed_with_its_expected_tokens() -> None:
    scores = []
    for num_sequences in (1, 4):
        run = driven()
        run.begin(0, [1], num_sequences=num_sequences)
        scores.append(run.scheduler.eviction.scores(0).copy())
    assert (scores[1] < scores[0]).all()


def test_a_forecast_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match="probabilities, 8 experts"):
        driven().scheduler.forecast(1, 0, np.zeros(7))


def test_a_streamed_layer_is_fetched_in_order_behind_demand_and_is_not_evicted() -> None:
    run = driven(num_slots=8, num_layers=2, num_experts=4, num_chunks=1)
    fetch(run, (1, 2))
    opened = run.begin(0, [0, 3])
    run.scheduler.stream(1, 1)
    run.admit(opened)
    assert names(run.issue(9)) == [(0, 0, 0), (0, 3, 0), (1, 0, 0), (1, 1, 0), (1, 3, 0)]


def test_a_streamed_layer_makes_room_in_the_one_just_left() -> None:
    run = driven(num_slots=4, num_layers=3, num_experts=4, num_chunks=1)
    fetch(run, (0, 0), (0, 1), (0, 2), (1, 3))
    run.scheduler.hint(0, [])
    run.scheduler.stream(2, 1)
    leases = run.issue(9)
    assert {key for _, key in ((0, lease.key) for lease in leases)} <= {ExpertKey(1, e) for e in (0, 1, 2)}
    assert leases
    assert run.scheduler.is_resident(1, 3)


def test_a_layer_whose_gate_has_chosen_is_not_streamed() -> None:
    run = driven(num_layers=2)
    run.scheduler.hint(1, [])
    run.scheduler.stream(1, 1)
    assert run.issue(9) == []


def test_withdrawn_forecasts_send_nothing_and_keep_what_arrived() -> None:
    run = driven(num_slots=4, num_chunks=2)
    run.forecast(1, 0, certain(1, 2))
    run.forecast(2, 1, certain(3))
    finish(run, run.issue(2))
    scores = run.scheduler.eviction.scores(0).copy()
    run.withdraw()
    assert run.issue(99) == []
    assert run.scheduler.is_resident(0, 1)
    assert not np.array_equal(run.scheduler.eviction.scores(0), scores)


def test_with_prefetch_off_forecasts_only_inform_eviction() -> None:
    run = driven(num_slots=2, num_layers=2, num_chunks=1, prefetch=False)
    fetch(run, (1, 0), (1, 1))
    run.begin(0, [])
    run.forecast(1, 1, certain(0))
    assert run.issue(99) == []
    run.admit(run.begin(0, [3]))
    run.issue(1)
    assert run.scheduler.resident() == [ExpertKey(1, 0)]


def test_prefetch_can_be_switched_while_running() -> None:
    run = driven(num_chunks=1)
    run.scheduler.prefetch_on = False
    run.forecast(1, 0, certain(1))
    assert run.issue(99) == []
    run.scheduler.prefetch_on = True
    run.forecast(1, 0, certain(1))
    assert names(run.issue(99)) == [(0, 1, 0)]


# -- failures and old leases ----------------------------------------------------------------------------------------


def test_a_failed_chunk_fails_its_visit_and_the_next_visit_retries() -> None:
    run = driven(num_chunks=2)
    opened = run.begin(0, [1, 2])
    run.admit(opened)
    first, *others = run.issue(99)
    run.fail(first)
    assert opened.visit.failed() == [1]
    assert run.issue(99) == []  # not behind the visit's back
    finish(run, others)  # among them the failed expert's other chunk
    assert opened.visit.ready() == [2]
    run.close(opened)
    again = run.begin(0, [1])
    run.admit(again)
    assert again.visit.failed() == []
    leases = run.issue(99)
    assert names(leases) == [(0, 1, 0), (0, 1, 1)]
    finish(run, leases)
    assert again.visit.ready() == [1]
    assert run.tally.failures == {"demand": 1}


def test_a_failure_reaches_every_visit_that_pinned_the_expert() -> None:
    run = driven(num_chunks=1)
    first, second = run.begin(0, [1]), run.begin(0, [1, 2])
    run.admit(first)
    run.admit(second)
    (lease, _) = run.issue(99)
    run.fail(lease)
    assert (first.visit.failed(), second.visit.failed()) == ([1], [1])
    run.close(first)
    assert second.visit.failed() == [1]
    run.close(second)
    assert run.scheduler.failures == set()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_neither_hint_nor_forecast_retries_what_a_visit_is_told_has_failed(num_chunks: int) -> None:
    run = driven(num_chunks=num_chunks)
    opened = run.begin(0, [1])
    run.admit(opened)
    run.hint(0, [1])  # another thread's gate
    (lease,) = run.issue(1)
    run.fail(lease)
    assert run.issue(99) == []
    run.begin(0, [2])
    run.forecast(2, 0, certain(1))
    assert run.issue(99) == []
    run.warm([ExpertKey(0, 1)])
    assert run.issue(99) == []
    assert opened.visit.failed() == [1]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_failed_speculation_is_not_retried_before_demand(num_chunks: int) -> None:
    run = driven(num_chunks=num_chunks, eviction="lru")
    run.forecast(1, 0, certain(5))
    (lease,) = run.issue(1)
    run.fail(lease)
    assert run.issue(99) == []  # the same forecast
    run.forecast(1, 0, certain(5))
    assert run.issue(99) == []  # a new one
    run.hint(0, [5])
    assert run.issue(99) == []  # a hint, which no visit may follow
    opened = run.begin(0, [5])
    run.admit(opened)
    leases = run.issue(99)
    assert len(leases) == num_chunks
    finish(run, leases)
    assert opened.visit.ready() == [5]
    assert run.tally.failures == {"prefetch": 1}
    # From here on it is like any other.
    run.close(opened)
    fetch(run, (1, 0), (1, 1), (1, 2), (1, 3))
    run.forecast(1, 0, certain(5))
    assert names(run.issue(1)) == [(0, 5, 0)]


def test_a_failure_of_an_abandoned_load_does_not_fail_its_successor() -> None:
    run = driven(num_chunks=2)
    first = run.begin(0, [1])
    run.admit(first)
    one, two = run.issue(99)
    run.fail(one)
    run.close(first)
    second = run.begin(0, [1])
    run.admit(second)
    assert run.issue(99) == []  # the slot still awaits the first load's other chunk
    run.fail(two)
    assert second.visit.failed() == []
    finish(run, run.issue(99))
    assert second.visit.ready() == [1]


def test_a_stale_lease_is_ignored_and_counted() -> None:
    run = driven(num_slots=1, num_chunks=1, strict=False)
    fetch(run, (0, 1))
    (old,) = run.returned
    fetch(run, (0, 2), (0, 1))
    assert run.returned[-1].slot == old.slot
    run.report_again(old, failed=False)
    run.report_again(old, failed=True)
    assert run.tally.stale == 2
    opened = run.begin(0, [3])
    run.admit(opened)
    (new,) = run.issue(99)
    assert new.slot == old.slot
    run.report_again(old._replace(key=new.key, code=new.code), failed=False)  # another generation of the same slot
    assert opened.visit.ready() == []
    run.complete(new)
    assert opened.visit.ready() == [3]


def test_a_stale_lease_is_an_error_in_strict_mode() -> None:
    run = driven(num_chunks=1)
    fetch(run, (0, 1))
    with pytest.raises(AssertionError, match="outdated lease"):
        run.scheduler.chunk_done(run.returned[0])


def test_a_chunk_reported_twice_does_not_pass_for_another() -> None:
    run = driven(num_chunks=2, strict=False)
    opened = run.begin(0, [1])
    run.admit(opened)
    first, second = run.issue(99)
    run.complete(first)
    run.report_again(first, failed=False)
    assert opened.visit.ready() == []
    run.complete(second)
    assert opened.visit.ready() == [1]


# -- other ----------------------------------------------------------------------------------------------------------


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


def test_a_forecast_of_no_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="a forecast of layer 2, 2 layers"):
        driven().scheduler.forecast(1, 2, certain(1))


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
    run.scheduler.cache_of(0)._free.pop()
    with pytest.raises(AssertionError, match=r"free, loading, draining, resident, slots = \(3, 0, 0, 0, 4\)"):
        run.scheduler.check_integrity()


def test_integrity_finds_a_pinned_expert_that_nobody_will_fetch() -> None:
    run = driven()
    run.admit(run.begin(0, [1]))
    run.scheduler._demand.clear()
    with pytest.raises(AssertionError, match="is pinned; resident, failed, coming"):
        run.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("fields", "learns"),
    [
        ({}, True),
        ({"prefetch": False}, True),
        ({"eviction": "lru"}, True),  # forecasts are weighed against it
        ({"eviction": "lru", "prefetch": False}, False),
        ({"num_slots": 16}, False),  # once every expert has a slot, no victim is ever sought
    ],
)
def test_the_prior_learns_where_it_can_be_asked(fields: dict[str, object], learns: bool) -> None:
    run = driven(**fields)
    fetch(run, *((layer_idx, expert_idx) for layer_idx in (0, 1) for expert_idx in range(8)))
    before = run.scheduler._prior._frequency.copy()
    for _ in range(3):
        fetch(run, (0, 1), (1, 2))
    assert (run.scheduler._prior._frequency != before).any() == learns


# -- another number of slots ----------------------------------------------------------------------------------------


def test_of_fewer_slots_those_keep_one_that_are_needed_soonest() -> None:
    run = driven(num_slots=4, num_chunks=1, eviction="lru")
    for layer_idx, expert_idx in ((0, 1), (1, 2), (0, 3), (1, 4)):
        fetch(run, (layer_idx, expert_idx))
    run.resize(0, 2)
    assert run.scheduler.resident() == [ExpertKey(0, 3), ExpertKey(1, 4)]
    run.resize(0, 3)
    fetch(run, (0, 5))
    assert run.scheduler.resident() == [ExpertKey(0, 3), ExpertKey(0, 5), ExpertKey(1, 4)]


def test_with_more_slots_everything_stays_and_may_fit() -> None:
    run = driven(num_slots=2, num_experts=2, num_chunks=1)
    for layer_idx in (0, 1):
        run.resize(0, 4)
        fetch(run, (layer_idx, 0))
        fetch(run, (layer_idx, 1))
    assert run.scheduler.everything_resident
    run.resize(0, 3)
    assert not run.scheduler.everything_resident


def test_what_was_half_fetched_and_what_was_announced_is_given_up() -> None:
    run = driven(num_slots=4, num_chunks=2)
    run.hint(0, [1, 2])
    (first, second) = run.issue(2)
    run.complete(first)
    run.complete(second)
    run.hint(0, [3])
    (lease,) = run.issue(1)
    run.complete(lease)
    run.resize(0, 3)
    assert run.scheduler.resident() == [ExpertKey(0, 1)]
    assert not run.scheduler.has_orders
    assert run.tally.wasted_bytes["demand"] > 0
    run.admit(run.begin(0, [1, 2, 3]))
    run.end_all()
