"""Which experts follow which."""

from __future__ import annotations

import numpy as np

from promoe.scheduler.correlation import MEMORY_VISITS, START_PROBABILITY, START_VISITS, Correlation


def test_before_anything_was_seen_all_are_equal() -> None:
    np.testing.assert_allclose(Correlation(3, 4).probability([0, 2]), np.full(4, START_PROBABILITY), rtol=1e-6)


def test_frequencies_are_of_the_chosen_experts_alone() -> None:
    correlation = Correlation(3, 4)
    for _ in range(1000):
        correlation.observe([0], [1, 2])
        correlation.observe([1], [3])
    np.testing.assert_allclose(correlation.probability([0]), [0, 1, 1, 0], atol=0.02)
    np.testing.assert_allclose(correlation.probability([0, 1]), [0, 0.5, 0.5, 0.5], atol=0.02)
    np.testing.assert_allclose(correlation.probability([2]), np.full(4, START_PROBABILITY), rtol=1e-6)


def test_the_start_weighs_as_few_visits() -> None:
    correlation = Correlation(1, 2)
    correlation.observe([0], [1])
    expected = START_VISITS * START_PROBABILITY / (START_VISITS + 1)
    np.testing.assert_allclose(correlation.probability([0]), [expected, expected + 1 / (START_VISITS + 1)], rtol=1e-6)


def test_old_habits_are_forgotten() -> None:
    correlation = Correlation(1, 2)
    for _ in range(10 * MEMORY_VISITS):
        correlation.observe([0], [0])
    for _ in range(3 * MEMORY_VISITS):
        correlation.observe([0], [1])
    forgotten, learned = correlation.probability([0])
    assert forgotten < 0.06
    assert learned > 0.94


def test_answers_are_copies() -> None:
    correlation = Correlation(1, 2)
    correlation.probability([0])[:] = 7.0
    np.testing.assert_allclose(correlation.probability([0]), np.full(2, START_PROBABILITY), rtol=1e-6)
