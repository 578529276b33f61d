"""Decayed Newton steps."""

from __future__ import annotations

import numpy as np

from promoe.scheduler.newton import NewtonSteps


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
