"""What a forecast is worth, learned from outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.calibration import BATCH_VISITS, MAX_COEFFICIENT, Calibration

NUM_EXPERTS = 16


def outcomes(rng: np.random.Generator, p: np.ndarray) -> list[int]:
    return np.flatnonzero(rng.random(len(p)) < p).tolist()


def taught(kind: str, num_visits: int = 400, steps_ahead: int = 1) -> tuple[Calibration, np.ndarray, np.ndarray]:
    """Returns the calibration, and a forecast with its prior, after visits that used experts with known odds."""
    rng = np.random.default_rng(0)
    calibration = Calibration()
    prior = rng.uniform(0.05, 0.6, NUM_EXPERTS)
    forecast = prior
    for _ in range(num_visits):
        truth = np.clip(prior * rng.choice([0.1, 1.5], NUM_EXPERTS), 0.01, 0.9)
        used = outcomes(rng, truth)
        forecast = {
            "exact": truth,
            "perfect": np.isin(np.arange(NUM_EXPERTS), used) * 1.0,
            "noise": rng.random(NUM_EXPERTS),
            "inverted": 1.0 - np.isin(np.arange(NUM_EXPERTS), used),
        }[kind]
        calibration.calibrate(0, steps_ahead, forecast, prior)
        calibration.observe(0, used)
    return calibration, forecast, prior


def test_certainties_stay_finite() -> None:
    certain = np.array([0.0, 0.5, 1.0])
    p = Calibration().calibrate(0, 1, certain, certain)  # half the log odds of each, which are clamped
    np.testing.assert_allclose(p, [0.001, 0.5, 0.999])


def test_at_first_forecast_and_prior_weigh_the_same() -> None:
    p = Calibration().calibrate(0, 1, np.array([0.9, 0.2]), np.array([0.1, 0.2]))
    np.testing.assert_allclose(p, [0.5, 0.2])


def test_noise_is_learned_to_be_worthless() -> None:
    calibration, forecast, prior = taught("noise")
    a, b, _ = calibration.coefficients(1)
    assert abs(a) < 0.1
    assert b > 0.6
    changed = calibration.calibrate(0, 1, 1.0 - forecast, prior)
    np.testing.assert_allclose(calibration.calibrate(0, 1, forecast, prior), changed, atol=0.1)


def test_exact_probabilities_are_believed() -> None:
    calibration, forecast, prior = taught("exact")
    a, b, c = calibration.coefficients(1)
    assert a > 0.8
    assert abs(b) < 0.25
    assert abs(c) < 0.25
    np.testing.assert_allclose(calibration.calibrate(0, 1, forecast, prior), forecast, atol=0.1)


def test_certainty_that_proves_right_is_kept() -> None:
    calibration, _, prior = taught("perfect")
    p = calibration.calibrate(0, 1, np.eye(NUM_EXPERTS)[3], prior)
    assert p[3] > 0.97
    assert np.delete(p, 3).max() < 0.05


def test_a_forecast_that_is_always_wrong_is_read_backwards() -> None:
    calibration, _, prior = taught("inverted")
    assert calibration.coefficients(1)[0] < -0.3
    p = calibration.calibrate(0, 1, np.eye(NUM_EXPERTS)[3], prior)
    assert p[3] < np.delete(p, 3).min()


def test_lookaheads_are_learned_apart() -> None:
    calibration, _, _ = taught("noise", steps_ahead=2)
    assert calibration.coefficients(1) == (0.5, 0.5, 0.0)
    assert calibration.coefficients(2) != (0.5, 0.5, 0.0)


def test_outcomes_count_in_batches() -> None:
    calibration = Calibration()
    p = np.full(NUM_EXPERTS, 0.9)
    for visit in range(BATCH_VISITS):
        assert calibration.coefficients(1) == (0.5, 0.5, 0.0), visit
        calibration.calibrate(visit % 3, 1, p, p)
        calibration.observe(visit % 3, [])
    assert calibration.coefficients(1) != (0.5, 0.5, 0.0)


def test_only_the_latest_forecast_of_a_lookahead_is_scored_and_only_once() -> None:
    calibration = Calibration()
    p = np.full(NUM_EXPERTS, 0.5)
    for _ in range(3 * BATCH_VISITS):
        calibration.calibrate(0, 1, p, p)
    calibration.observe(0, [1])
    for _ in range(3 * BATCH_VISITS):
        calibration.observe(0, [1])
    assert calibration.coefficients(1) == (0.5, 0.5, 0.0)


def test_a_visit_that_says_nothing_drops_its_forecasts() -> None:
    calibration = Calibration()
    p = np.full(NUM_EXPERTS, 0.9)
    for _ in range(2 * BATCH_VISITS):
        calibration.calibrate(0, 1, p, p)
        calibration.observe(0, None)
        calibration.observe(0, [])
    assert calibration.coefficients(1) == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("used", [[], list(range(NUM_EXPERTS))])
def test_coefficients_stay_bounded(used: list[int]) -> None:
    calibration = Calibration()
    rng = np.random.default_rng(0)
    for _ in range(500):
        calibration.calibrate(0, 1, rng.choice([0.0, 1.0], NUM_EXPERTS), rng.choice([0.001, 0.999], NUM_EXPERTS))
        calibration.observe(0, used)
    assert np.isfinite(calibration.coefficients(1)).all()
    assert np.abs(calibration.coefficients(1)).max() <= MAX_COEFFICIENT
