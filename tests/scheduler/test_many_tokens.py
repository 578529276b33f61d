"""Visits of many tokens: the order of their experts, and what is expected of the next layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.scheduler.many_tokens import MOST_SHOWN, most_needed_first, of_all, shown, uses_most


@given(tokens=st.lists(st.lists(st.integers(0, 5), max_size=4)))
def test_experts_of_most_tokens_come_first(tokens: list[list[int]]) -> None:
    ids = most_needed_first(tokens)
    counts = [sum(token.count(expert_idx) for token in tokens) for expert_idx in ids]
    assert set(ids) == {expert_idx for token in tokens for expert_idx in token}
    assert list(zip(counts, ids, strict=True)) == sorted(
        zip(counts, ids, strict=True), key=lambda pair: (-pair[0], pair[1])
    )


@pytest.mark.parametrize(
    ("tokens", "used", "most"),
    [(MOST_SHOWN, 10, False), (MOST_SHOWN + 1, 7, True), (MOST_SHOWN + 1, 6, False), (500, 6, False), (500, 10, True)],
)
def test_only_many_tokens_that_use_most_of_ten_experts_say_nothing_more(tokens: int, used: int, most: bool) -> None:
    assert uses_most(tokens, used, 10) is most


@given(count=st.integers(1, 1000))
def test_some_tokens_are_shown_at_even_distances(count: int) -> None:
    found = list(range(count))[shown(count)]
    assert (count == len(found)) if count <= MOST_SHOWN else (MOST_SHOWN // 2 < len(found) <= MOST_SHOWN)
    assert len(set(np.diff(found))) <= 1
    assert count - found[-1] <= -(-count // MOST_SHOWN), "as far as the end"


@given(p=st.floats(0, 1), some=st.integers(1, 8), times=st.integers(1, 50))
def test_the_tokens_that_are_not_shown_are_taken_to_be_like_the_others(p: float, some: int, times: int) -> None:
    any_shown = 1 - (1 - p) ** some
    found = of_all(np.array([any_shown]), some, some * times)
    assert found[0] == pytest.approx(1 - (1 - p) ** (some * times), abs=1e-6)
    assert found[0] >= any_shown - 1e-12


def test_numbers_that_are_no_probabilities_become_some() -> None:
    found = of_all(np.array([-1.0, 2.0, np.nan]), 8, 20)
    assert found[:2].tolist() == [0.0, 1.0]
    assert np.isnan(found[2])
