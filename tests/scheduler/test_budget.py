from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.scheduler.budget import WasteBudget

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
    """So that a prompt's worth of waste does not switch prefetch off for long."""
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
    """Everything that is moved is speculation here, of the probability given, and all of it is wasted."""
    budget = WasteBudget(least, share, SPAN)
    moved = wasted = 0
    for nbytes, probability in events:
        assert least <= budget.threshold <= 1.0
        if probability < 1.0 and probability >= budget.threshold:
            moved, wasted = moved + nbytes, wasted + nbytes
            budget.moved(nbytes)
            budget.wasted(nbytes)
    assert wasted <= share * moved + SPAN + 500
