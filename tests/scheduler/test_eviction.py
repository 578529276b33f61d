"""Each policy's order of victims, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from promoe.scheduler.eviction import Eviction, Lfru, Lru, NextUse, Static, create
from promoe.scheduler.reuse import ReusePrior


def visit(policy: Eviction, layer_idx: int, ids: Sequence[int], num_next: int = 1) -> None:
    policy.visited(layer_idx, ids, [ids], num_next)


def victims(policy: Eviction, current_layer: int = 0) -> list[tuple[int, int]]:
    """(layer, expert), the first to go first; equals by number."""
    scores = policy.scores(current_layer)
    order = np.argsort(-scores.ravel(), kind="stable")
    return [divmod(int(code), scores.shape[1]) for code in order]


def test_lru_drops_the_one_unused_for_longest_whatever_its_layer() -> None:
    policy = Lru(2, 3)
    visit(policy, 0, [2, 0])
    visit(policy, 1, [1])
    visit(policy, 0, [2])
    assert victims(policy) == [(0, 1), (1, 0), (1, 2), (0, 0), (1, 1), (0, 2)]
    assert not policy.comparable


def test_lru_counts_a_load_as_a_use() -> None:
    policy = Lru(1, 3)
    visit(policy, 0, [0, 1, 2])
    policy.loading(0, 0)
    assert victims(policy) == [(0, 1), (0, 2), (0, 0)]


def test_lru_stamps_a_visit_in_id_order() -> None:
    policy = Lru(1, 3)
    visit(policy, 0, [2, 1, 0])
    assert victims(policy) == [(0, 0), (0, 1), (0, 2)]


def test_lfru_keeps_the_frequent_longer_than_the_recent() -> None:
    policy = Lfru(1, 3)
    for ids in ([0], [0], [0], [0], [1], [2]):
        visit(policy, 0, ids)
    # Uses + 1 over age + 1, the clock at 6: 5 / 3, 2 / 2, 2 / 1.
    np.testing.assert_allclose(policy.scores(0), [[-5 / 3, -1.0, -2.0]])
    assert victims(policy) == [(0, 1), (0, 0), (0, 2)]
    assert victims(lru_after([0], [0], [0], [0], [1], [2])) == [(0, 0), (0, 1), (0, 2)]


def lru_after(*visits: list[int]) -> Lru:
    policy = Lru(1, 3)
    for ids in visits:
        visit(policy, 0, ids)
    return policy


def test_lfru_lets_the_frequent_age() -> None:
    policy = Lfru(1, 3)
    for ids in ([0], [0], [0], [1], [2], [1], [2], [1], [2]):
        visit(policy, 0, ids)
    assert victims(policy)[0] == (0, 0)


def test_static_without_counts_is_lfu() -> None:
    policy = Static(1, 3)
    for ids in ([0, 1], [1], [1, 2], [2]):
        visit(policy, 0, ids)
    assert victims(policy) == [(0, 0), (0, 2), (0, 1)]
    policy.loading(0, 0)
    policy.forecast(0, np.array([1.0, 0.0, 0.0]))
    assert victims(policy) == [(0, 0), (0, 2), (0, 1)]


def test_static_with_counts_learns_no_more() -> None:
    policy = Static(2, 2)
    policy.fix(np.array([[5.0, 1.0], [3.0, 2.0]]))
    for _ in range(9):
        visit(policy, 0, [1])
    assert victims(policy) == [(0, 1), (1, 1), (1, 0), (0, 0)]


def next_use(num_layers: int, num_experts: int) -> tuple[NextUse, ReusePrior]:
    prior = ReusePrior(num_layers, num_experts)
    return NextUse(num_layers, num_experts, prior), prior


def test_next_use_is_the_formula() -> None:
    policy, prior = next_use(4, 2)
    policy.forecast(2, np.array([0.8, 0.0]))
    p = prior.probability(0)[0]  # of all: nothing was used yet
    # d = 3, 4, 1, 2 after layer 1; then (1 - p_f) * 4 / p.
    wait, long, short = (1 - p) * 4 / p, 0.999 * 4 / p, 0.2 * 4 / p
    expected = np.array([[3 + wait] * 2, [4 + wait] * 2, [1 + short, 1 + long], [2 + wait] * 2])
    np.testing.assert_allclose(policy.scores(1), expected)


def test_next_use_drops_the_layer_just_visited_first_when_all_else_is_equal() -> None:
    policy, _ = next_use(3, 1)
    assert victims(policy, current_layer=1) == [(1, 0), (0, 0), (2, 0)]


def test_next_use_prefers_what_was_used_before() -> None:
    policy, prior = next_use(1, 3)
    for ids in ([0, 1], [0], [0, 1]):
        prior.observe(0, [ids])
        visit(policy, 0, ids)
    assert victims(policy) == [(0, 2), (0, 1), (0, 0)]


def test_next_use_forgets_a_forecast_at_its_visit_and_on_demand() -> None:
    policy, _ = next_use(2, 2)
    before = policy.scores(1).copy()
    policy.forecast(0, np.array([1.0, 0.0]))
    assert victims(policy, 1)[-1] == (0, 0)
    visit(policy, 0, [])
    np.testing.assert_array_equal(policy.scores(1), before)
    policy.forecast(0, np.array([1.0, 0.0]))
    policy.forecast(0, None)
    np.testing.assert_array_equal(policy.scores(1), before)


def test_a_forecast_equal_to_the_prior_leaves_every_score() -> None:
    policy, prior = next_use(2, 4)
    prior.observe(0, [[1, 2]])
    visit(policy, 0, [1, 2])
    before = policy.scores(0).copy()
    policy.forecast(0, prior.probability(0))
    np.testing.assert_array_equal(policy.scores(0), before)


def test_surely_unused_next_time_is_not_never_used_again() -> None:
    policy, prior = next_use(1, 2)
    for _ in range(30):
        prior.observe(0, [[0]])
    visit(policy, 0, [0])
    policy.forecast(0, np.array([0.0, 0.5]))
    # Expert 0 is used nearly always, expert 1 nearly never: the one visit that is forecast weighs little.
    assert victims(policy) == [(0, 1), (0, 0)]


def test_more_tokens_at_the_next_visits_bring_every_use_nearer() -> None:
    policy, _ = next_use(2, 2)
    one = policy.scores(0).copy()
    policy.visited(0, [0], [[0]], 4)
    assert (policy.scores(0) < one).all()


def test_a_forecast_of_a_layer_with_fewer_experts_fills_up_with_the_least() -> None:
    policy, prior = next_use(1, 3)
    policy.forecast(0, np.array([0.5]))
    pass_steps = 1 / prior.probability(0)[0]
    np.testing.assert_allclose(policy.scores(0), [[1 + 0.5 * pass_steps] + [1 + 0.999 * pass_steps] * 2])


@pytest.mark.parametrize(("name", "kind"), [("lru", Lru), ("lfru", Lfru), ("static", Static), ("next_use", NextUse)])
def test_policies_by_name(name: str, kind: type) -> None:
    policy = create(name, 2, 3, ReusePrior(2, 3))  # type: ignore[arg-type]
    assert type(policy) is kind
    assert policy.scores(0).shape == (2, 3)


def test_static_keeps_what_was_popular_before() -> None:
    policy = Static(2, 3)
    policy.popular([[3.0, 1.0, 2.0], [5.0, 4.0]])
    policy.visited(0, [1], [[1]], 1)
    assert policy.scores(0).tolist() == [[-3.0, -1.0, -2.0], [-5.0, -4.0, 0.0]]
