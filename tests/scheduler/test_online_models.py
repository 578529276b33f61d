"""The models that learn while running: about experts of one layer, of two layers, and the coefficients of others."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.online_models import (
    FIRST_RATE,
    LAST_RATE,
    MEMORY_VISITS,
    START_PROBABILITY,
    START_VISITS,
    CrossLayerTable,
    LogOdds,
    NewtonSteps,
    SameLayerModel,
)

OWN = np.array([0.0, -1.0, 2.0, -3.0], dtype=np.float32)


def expected(model: SameLayerModel, own: LogOdds, chosen: list[int]) -> LogOdds:
    p: LogOdds = 1 / (1 + np.exp(-model.log_odds(own, chosen)))
    return p


def teach(model: SameLayerModel, own: LogOdds, chosen: list[int], came: list[int]) -> LogOdds:
    """Return the error that was corrected."""
    error = -expected(model, own, chosen)
    error[came] += 1.0
    model.correct(error[None], [chosen])
    return error


def test_at_first_nothing_is_added() -> None:
    np.testing.assert_array_equal(SameLayerModel(4).log_odds(OWN, [0, 2]), OWN)
    np.testing.assert_array_equal(SameLayerModel(4).log_odds(OWN, []), OWN)


def test_one_outcome_corrects_the_share_of_its_error() -> None:
    model = SameLayerModel(4)
    step = FIRST_RATE * teach(model, OWN, [0, 2], [1, 3]) / 3
    np.testing.assert_allclose(model.log_odds(OWN, [0, 2]), OWN + 2 * step, rtol=1e-5)
    np.testing.assert_allclose(model.log_odds(OWN, [0, 3]), OWN + step, rtol=1e-5)
    np.testing.assert_array_equal(model.log_odds(OWN, [1, 3]), OWN)


def test_after_many_visits_errors_are_corrected_less() -> None:
    model, own = SameLayerModel(2), np.zeros(2, dtype=np.float32)
    for _ in range(4000):
        model.correct(np.zeros((1, 2), dtype=np.float32), [[0]])
    error = teach(model, own, [0], [1])
    np.testing.assert_allclose(model.log_odds(own, [0]), LAST_RATE * error / 2, rtol=1e-5)


def test_followers_are_told_from_what_is_used_as_often() -> None:
    """Expert 1 follows 0, and expert 3 follows 2; each is used every other time."""
    model, own = SameLayerModel(4), np.zeros(4, dtype=np.float32)
    for turn in range(800):
        teach(model, own, [0, 1], [1]) if turn % 2 else teach(model, own, [2, 3], [3])
    after = [expected(model, own, chosen) for chosen in ([0, 1], [2, 3])]
    assert after[0][1] > 0.9 > 0.1 > after[0][3]
    assert after[1][3] > 0.9 > 0.1 > after[1][1]


def test_two_that_say_the_same_are_not_believed_twice() -> None:
    """Probabilities stay those of the outcomes, however many experts are used together."""
    model, own, rng = SameLayerModel(8), np.zeros(8, dtype=np.float32), np.random.default_rng(0)
    for _ in range(4000):
        teach(model, own, [0, 1, 2, 3], [5] if rng.random() < 0.7 else [6])
    p = expected(model, own, [0, 1, 2, 3])
    np.testing.assert_allclose(p[[5, 6]], [0.7, 0.3], atol=0.1)


def test_several_visits_at_once_are_answered_and_corrected_each_by_itself() -> None:
    """The visits have different numbers of experts."""
    together, apart = SameLayerModel(4), SameLayerModel(4)
    chosen = [[0, 2], [1]]
    errors = np.array([[0.5, -0.1, 0.2, 0.0], [-0.3, 0.1, 0.0, 0.4]], dtype=np.float32)
    together.correct(errors, chosen)
    for error, ids in zip(errors, chosen, strict=True):
        apart.correct(error[None], [ids])
    np.testing.assert_allclose(together._weights, apart._weights, rtol=0.01)  # the rate falls a little between them
    assert together._weights[[0, 1, 2]].any(axis=1).all()
    found = together.log_odds_of(np.stack([OWN, -OWN]), chosen)
    for row, own, ids in zip(found, (OWN, -OWN), chosen, strict=True):
        assert row == pytest.approx(together.log_odds(own, ids), rel=1e-5)


@pytest.mark.parametrize("num_experts", [16, 256])
def test_choices_in_ones_and_zeros_are_the_same_choices(num_experts: int) -> None:
    rng, num_visits = np.random.default_rng(0), 8
    plain, dense = SameLayerModel(num_experts), SameLayerModel(num_experts)
    for _ in range(5):
        chosen = [rng.permutation(num_experts)[: 1 + visit % 4].tolist() for visit in range(num_visits)]
        used, (own, errors) = (
            np.zeros((num_visits, num_experts), np.float32),
            rng.normal(size=(2, num_visits, num_experts)),
        )
        for row, ids in zip(used, chosen, strict=True):
            row[ids] = 1.0
        plain.correct(errors.astype(np.float32), chosen)
        dense.correct(errors.astype(np.float32), chosen, used)
        np.testing.assert_allclose(dense.weights, plain.weights, atol=1e-6)
        found = [one.log_odds_of(own.astype(np.float32), chosen, more) for one, more in ((plain, None), (dense, used))]
        np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_before_anything_was_seen_all_are_equal() -> None:
    np.testing.assert_allclose(CrossLayerTable(3, 4).probability([0, 2]), np.full(4, START_PROBABILITY), rtol=1e-6)


def test_frequencies_are_of_the_chosen_experts_alone() -> None:
    table = CrossLayerTable(3, 4)
    for _ in range(1000):
        table.observe([0], [1, 2])
        table.observe([1], [3])
    np.testing.assert_allclose(table.probability([0]), [0, 1, 1, 0], atol=0.02)
    np.testing.assert_allclose(table.probability([0, 1]), [0, 0.5, 0.5, 0.5], atol=0.02)
    np.testing.assert_allclose(table.probability([2]), np.full(4, START_PROBABILITY), rtol=1e-6)


def test_the_start_weighs_as_few_visits() -> None:
    table = CrossLayerTable(1, 2)
    table.observe([0], [1])
    expected = START_VISITS * START_PROBABILITY / (START_VISITS + 1)
    np.testing.assert_allclose(table.probability([0]), [expected, expected + 1 / (START_VISITS + 1)], rtol=1e-6)


def test_old_habits_are_forgotten() -> None:
    table = CrossLayerTable(1, 2)
    for _ in range(10 * MEMORY_VISITS):
        table.observe([0], [0])
    for _ in range(3 * MEMORY_VISITS):
        table.observe([0], [1])
    forgotten, learned = table.probability([0])
    assert forgotten < 0.06
    assert learned > 0.94


def test_answers_are_copies() -> None:
    table = CrossLayerTable(1, 2)
    table.probability([0])[:] = 7.0
    np.testing.assert_allclose(table.probability([0]), np.full(2, START_PROBABILITY), rtol=1e-6)


def test_a_step_is_the_error_over_what_is_known() -> None:
    steps = NewtonSteps(1, start_outcomes=3.0, memory_visits=2.0, ridge=1.0)
    features, errors = np.array([[2.0, 1.0]]), np.array([0.5, -0.25])
    step = steps.step(features, np.array([0.5, 0.5]), errors, 1)
    # Half of the start is forgotten; the outcomes add p (1 - p) x^2 each; the ridge stays.
    np.testing.assert_allclose(step, [(2 * 0.5 - 0.25) / (3 / 2 + 0.25 * 4 + 0.25 * 1 + 1)])


def test_steps_find_the_coefficients_that_outcomes_follow() -> None:
    rng, truth, found = np.random.default_rng(0), np.array([1.5, -0.5]), np.zeros(2)
    steps = NewtonSteps(2, start_outcomes=10.0, memory_visits=1000.0)
    for _ in range(400):
        features = rng.normal(size=(2, 16))
        expected = 1 / (1 + np.exp(-(found @ features)))
        came = rng.random(16) < 1 / (1 + np.exp(-(truth @ features)))
        found = found + steps.step(features, expected, came - expected, 8)
    np.testing.assert_allclose(found, truth, atol=0.2)
