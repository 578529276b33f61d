"""What the use of an expert says about the next uses of the others, learned from outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.association import FIRST_RATE, LAST_RATE, Association, LogOdds

OWN = np.array([0.0, -1.0, 2.0, -3.0], dtype=np.float32)


def expected(association: Association, own: LogOdds, chosen: list[int]) -> LogOdds:
    p: LogOdds = 1 / (1 + np.exp(-association.log_odds(own, chosen)))
    return p


def teach(association: Association, own: LogOdds, chosen: list[int], came: list[int]) -> LogOdds:
    """Returns the error that was corrected."""
    error = -expected(association, own, chosen)
    error[came] += 1.0
    association.correct(error[None], [chosen])
    return error


def test_at_first_nothing_is_added() -> None:
    np.testing.assert_array_equal(Association(4).log_odds(OWN, [0, 2]), OWN)
    np.testing.assert_array_equal(Association(4).log_odds(OWN, []), OWN)


def test_one_outcome_corrects_the_share_of_its_error() -> None:
    association = Association(4)
    step = FIRST_RATE * teach(association, OWN, [0, 2], [1, 3]) / 3
    np.testing.assert_allclose(association.log_odds(OWN, [0, 2]), OWN + 2 * step, rtol=1e-5)
    np.testing.assert_allclose(association.log_odds(OWN, [0, 3]), OWN + step, rtol=1e-5)
    np.testing.assert_array_equal(association.log_odds(OWN, [1, 3]), OWN)


def test_after_many_visits_errors_are_corrected_less() -> None:
    association, own = Association(2), np.zeros(2, dtype=np.float32)
    for _ in range(4000):
        association.correct(np.zeros((1, 2), dtype=np.float32), [[0]])
    error = teach(association, own, [0], [1])
    np.testing.assert_allclose(association.log_odds(own, [0]), LAST_RATE * error / 2, rtol=1e-5)


def test_followers_are_told_from_what_is_used_as_often() -> None:
    """Expert 1 follows 0, and expert 3 follows 2; each is used every other time."""
    association, own = Association(4), np.zeros(4, dtype=np.float32)
    for turn in range(800):
        teach(association, own, [0, 1], [1]) if turn % 2 else teach(association, own, [2, 3], [3])
    after = [expected(association, own, chosen) for chosen in ([0, 1], [2, 3])]
    assert after[0][1] > 0.9 > 0.1 > after[0][3]
    assert after[1][3] > 0.9 > 0.1 > after[1][1]


def test_two_that_say_the_same_are_not_believed_twice() -> None:
    """Probabilities stay those of the outcomes, however many experts are used together."""
    association, own, rng = Association(8), np.zeros(8, dtype=np.float32), np.random.default_rng(0)
    for _ in range(4000):
        teach(association, own, [0, 1, 2, 3], [5] if rng.random() < 0.7 else [6])
    p = expected(association, own, [0, 1, 2, 3])
    np.testing.assert_allclose(p[[5, 6]], [0.7, 0.3], atol=0.1)


def test_several_visits_at_once_are_answered_and_corrected_each_by_itself() -> None:
    """Of different numbers of experts."""
    together, apart = Association(4), Association(4)
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
    plain, dense = Association(num_experts), Association(num_experts)
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
