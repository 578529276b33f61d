"""What became of every fetched byte (used, wasted or pending; nothing twice, nothing lost), and the budget for waste."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.scheduler.waste import FetchedBytes, WasteBudget

from .simulated import Tally

SPAN = 1000


def test_the_more_is_wasted_the_surer_a_forecast_has_to_be_and_moving_bytes_forgives() -> None:
    budget = WasteBudget(0.5, 0.02, SPAN)
    assert budget.threshold == 0.5
    budget.wasted(500)
    assert budget.threshold == pytest.approx(0.75)
    budget.moved(10_000)  # 200 of which may be wasted
    assert budget.threshold == pytest.approx(0.65)
    budget.moved(15_000)
    assert budget.threshold == 0.5


def test_what_was_moved_before_is_no_credit() -> None:
    budget = WasteBudget(0.5, 0.02, SPAN)
    budget.moved(10**9)
    budget.wasted(500)
    assert budget.threshold == pytest.approx(0.75)


def test_at_most_the_span_is_owed() -> None:
    """Otherwise the waste of one prompt would switch prefetch off for long."""
    budget = WasteBudget(0.5, 0.1, SPAN)
    budget.wasted(10**9)
    assert budget.threshold == 1.0
    budget.moved(5_000)
    assert budget.threshold == pytest.approx(0.75)


def test_a_share_of_one_sets_no_limit() -> None:
    budget = WasteBudget(0.5, 1.0, SPAN)
    budget.wasted(10**9)
    assert budget.threshold == 0.5


@given(
    least=st.floats(0.01, 1.0),
    share=st.floats(0.0, 0.2),
    events=st.lists(st.tuples(st.integers(0, 500), st.floats(0.0, 1.0)), max_size=200),
)
def test_who_keeps_to_it_wastes_no_more_than_the_share_and_the_span(
    least: float, share: float, events: list[tuple[int, float]]
) -> None:
    """Here, all moved bytes were prefetched, with the given probability, and all are wasted."""
    budget = WasteBudget(least, share, SPAN)
    moved = wasted = 0
    for nbytes, probability in events:
        assert least <= budget.threshold <= 1.0
        if probability < 1.0 and probability >= budget.threshold:
            moved, wasted = moved + nbytes, wasted + nbytes
            budget.moved(nbytes)
            budget.wasted(nbytes)
    assert wasted <= share * moved + SPAN + 500


def fetched() -> tuple[FetchedBytes, Tally]:
    tally = Tally()
    return FetchedBytes(tally, WasteBudget(0.5, 0.025, 1000)), tally


def test_prefetched_bytes_are_pending_until_asked_for() -> None:
    book, tally = fetched()
    book.arrived(0, 7, "prefetch", 10, pinned=False)
    book.arrived(0, 7, "prefetch", 5, pinned=False)
    assert (tally.moved, tally.used, book.pending_bytes()) == ({"prefetch": 15}, 0, 15)
    book.asked(0, 7)
    assert (tally.used, book.pending_bytes()) == (15, 0)
    book.asked(0, 7)
    book.dropped(0, 7)
    assert tally.used == 15
    assert not tally.wasted_bytes


def test_bytes_that_arrive_for_a_pinned_expert_are_used_at_once() -> None:
    book, tally = fetched()
    book.arrived(0, 7, "prefetch", 10, pinned=True)
    book.arrived(0, 7, "demand", 10, pinned=True)
    assert tally.used == 10
    book.dropped(0, 7)
    assert not tally.wasted_bytes


def test_bytes_dropped_unasked_are_wasted_by_cause() -> None:
    book, tally = fetched()
    book.arrived(0, 7, "prefetch", 10, pinned=False)
    book.arrived(0, 7, "demand", 3, pinned=False)  # a hint that no visit followed
    book.arrived(1, 8, "prefetch", 4, pinned=False)
    assert book.pending_bytes() == 14
    book.dropped(0, 7)
    assert tally.wasted_bytes == {"prefetch": 10, "demand": 3}
    assert book.pending_bytes() == 4


def test_hinted_bytes_that_are_asked_for_are_neither_used_nor_wasted() -> None:
    book, tally = fetched()
    book.arrived(0, 7, "demand", 3, pinned=False)
    book.asked(0, 7)
    book.dropped(0, 7)
    assert tally.used == 0
    assert not tally.wasted_bytes


def test_bytes_that_arrive_in_a_lost_slot_are_wasted() -> None:
    book, tally = fetched()
    book.arrived_late(0, "prefetch", 10)
    assert tally.moved == tally.wasted_bytes == {"prefetch": 10}
    assert book.pending_bytes() == 0


def test_what_is_moved_and_wasted_is_put_on_the_budget() -> None:
    budget = WasteBudget(0.5, 0.1, 100)
    book = FetchedBytes(Tally(), budget)
    book.arrived(0, 1, "prefetch", 50, pinned=False)
    book.arrived(0, 2, "demand", 50, pinned=False)
    book.dropped(0, 2)  # a hint that no visit followed: no prediction
    assert budget.threshold == 0.5
    book.dropped(0, 1)
    assert budget.threshold == 0.75
    book.arrived_late(0, "prefetch", 40)
    assert budget.threshold == 0.5 + 0.5 * (50 - 4 + 40) / 100
    book.arrived_late(0, "demand", 60)
    assert budget.threshold == 0.5 + 0.5 * (50 - 4 + 40 - 6) / 100
