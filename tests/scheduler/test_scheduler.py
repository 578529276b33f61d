"""Cases worked by hand: hints, forecasts, and resizing a pool."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler import ExpertKey, Scheduler, SchedulerConfig
from promoe.scheduler.calibration import START_COEFFICIENTS
from promoe.scheduler.reuse import LearnedReuse

from .by_hand import certain, config, driven, fetch, finish, names

# -- hints -----------------------------------------------------------------------------------------------------------


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


# -- forecasts -------------------------------------------------------------------------------------------------------


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
    """The others stay, whatever was used last."""
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
    """Visit layer 0 with these experts."""
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


def test_a_streamed_layers_experts_come_in_the_order_of_use() -> None:
    run = driven(num_slots=8, num_layers=2, num_experts=4, num_chunks=1)
    run.scheduler.start_from([[0.5] * 4, [0.1, 0.7, 0.2, 0.5]])
    run.scheduler.stream(1, 1)
    assert names(run.issue(9)) == [(1, 1, 0), (1, 3, 0), (1, 2, 0), (1, 0, 0)]


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


def test_a_forecast_of_no_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="a forecast of layer 2, 2 layers"):
        driven().scheduler.forecast(1, 2, certain(1))


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


# -- another number of slots -----------------------------------------------------------------------------------------


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
