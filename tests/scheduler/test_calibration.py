"""How forecasts are calibrated by their outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.calibration import (
    BATCH_VISITS,
    LAYER_BATCH_VISITS,
    MAX_COEFFICIENT,
    START_COEFFICIENTS,
    TABLE_STEPS,
    Calibration,
)

NUM_EXPERTS = 16


def calibration_of(num_layers: int = 3) -> Calibration:
    return Calibration([NUM_EXPERTS] * num_layers)


def outcomes(rng: np.random.Generator, p: np.ndarray) -> list[int]:
    return np.flatnonzero(rng.random(len(p)) < p).tolist()


def taught(kind: str, num_visits: int = 400, steps_ahead: int = 1) -> tuple[Calibration, np.ndarray, np.ndarray]:
    """Return the calibration, and a forecast with its prior, after visits that used experts with known odds."""
    rng = np.random.default_rng(0)
    calibration = calibration_of()
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
    p = calibration_of().calibrate(0, 1, certain, certain)  # log odds are clamped, and 1.3 times as large in sum
    odds = 999.0**1.3
    np.testing.assert_allclose(p, [1 / (1 + odds), 0.5, odds / (1 + odds)])


def test_at_first_the_prior_is_believed_and_a_forecast_a_little() -> None:
    p = calibration_of().calibrate(0, 1, np.array([0.9, 0.5]), np.array([0.1, 0.2]))
    odds = 9.0**0.3 / 9.0
    np.testing.assert_allclose(p, [odds / (1 + odds), 0.2])


def test_noise_is_learned_to_be_worthless() -> None:
    calibration, forecast, prior = taught("noise")
    a, b, _, _ = calibration.coefficients(0, 1)
    assert abs(a) < 0.1
    assert b > 0.6
    changed = calibration.calibrate(0, 1, 1.0 - forecast, prior)
    np.testing.assert_allclose(calibration.calibrate(0, 1, forecast, prior), changed, atol=0.1)


def test_exact_probabilities_are_believed() -> None:
    calibration, forecast, prior = taught("exact")
    a, b, _, d = calibration.coefficients(0, 1)
    assert a > 0.8
    assert abs(b) < 0.25
    assert abs(d) < 0.25
    np.testing.assert_allclose(calibration.calibrate(0, 1, forecast, prior), forecast, atol=0.1)


def test_certainty_that_proves_right_is_kept() -> None:
    calibration, _, prior = taught("perfect")
    p = calibration.calibrate(0, 1, np.eye(NUM_EXPERTS)[3], prior)
    assert p[3] > 0.97
    assert np.delete(p, 3).max() < 0.05


def test_a_forecast_that_is_always_wrong_is_read_backwards() -> None:
    calibration, _, prior = taught("inverted")
    assert calibration.coefficients(0, 1)[0] < -0.3
    p = calibration.calibrate(0, 1, np.eye(NUM_EXPERTS)[3], prior)
    assert p[3] < np.delete(p, 3).min()


def test_lookaheads_are_learned_apart() -> None:
    calibration, _, _ = taught("noise", steps_ahead=2)
    assert calibration.coefficients(0, 1) == START_COEFFICIENTS
    assert calibration.coefficients(0, 2) != START_COEFFICIENTS


def test_layers_are_learned_apart() -> None:
    """A forecast can be good for one layer and worthless for the next, as behind a model's first layer."""
    rng = np.random.default_rng(0)
    calibration, prior = calibration_of(), np.full(NUM_EXPERTS, 0.2)
    for _ in range(10 * LAYER_BATCH_VISITS):
        used = outcomes(rng, prior)
        for layer_idx, told in enumerate([np.isin(np.arange(NUM_EXPERTS), used) * 0.8 + 0.1, rng.random(NUM_EXPERTS)]):
            calibration.calibrate(layer_idx, 1, told, prior)
            calibration.observe(layer_idx, used)
    told = np.where(np.arange(NUM_EXPERTS) == 3, 0.9, 0.1)
    good, worthless = (calibration.calibrate(layer_idx, 1, told, prior) for layer_idx in (0, 1))
    assert good[3] > 0.9
    assert np.delete(good, 3).max() < 0.1
    np.testing.assert_allclose(worthless, prior, atol=0.15)


def test_a_layer_seen_for_the_first_time_starts_from_what_the_others_taught() -> None:
    calibration, _, _ = taught("noise")
    assert calibration.coefficients(1, 1) != START_COEFFICIENTS
    assert abs(calibration.coefficients(1, 1)[0]) < 0.1


def following(chosen: list[int]) -> list[int]:
    """Let a layer use the experts that follow those chosen before it."""
    return [(expert_idx + 5) % NUM_EXPERTS for expert_idx in chosen]


def taught_to_follow(steps_ahead: int) -> Calibration:
    rng = np.random.default_rng(0)
    calibration = calibration_of()
    nothing_known = np.full(NUM_EXPERTS, 0.2)
    for _ in range(200):
        chosen = rng.choice(NUM_EXPERTS, 2, replace=False).tolist()
        calibration.calibrate(2, steps_ahead, rng.random(NUM_EXPERTS), nothing_known, chosen)
        calibration.observe(2, following(chosen))
    return calibration


@pytest.mark.parametrize("steps_ahead", [1, TABLE_STEPS])
def test_what_followed_what_is_learned_beside_a_worthless_forecast(steps_ahead: int) -> None:
    calibration, chosen, even = taught_to_follow(steps_ahead), [3, 14], np.full(NUM_EXPERTS, 0.2)
    p = calibration.calibrate(2, steps_ahead, even, even, chosen)
    assert sorted(np.argsort(p)[-2:].tolist()) == sorted(following(chosen))
    assert p[following(chosen)].min() > 0.5
    assert np.delete(p, following(chosen)).max() < 0.2


@pytest.mark.parametrize(("steps_ahead", "chosen"), [(TABLE_STEPS + 1, [3, 14]), (1, [])])
def test_too_far_ahead_or_without_a_choice_nothing_is_correlated(steps_ahead: int, chosen: list[int]) -> None:
    even = np.full(NUM_EXPERTS, 0.2)
    p = taught_to_follow(steps_ahead).calibrate(2, steps_ahead, even, even, chosen)
    assert np.ptp(p) == 0.0


def test_layers_may_have_different_numbers_of_experts() -> None:
    calibration = Calibration([3, 5])
    for layer_idx, num_chosen, num_experts in [(0, 5, 3), (1, 3, 5)] * BATCH_VISITS:
        even = np.full(num_experts, 0.2)
        assert calibration.calibrate(layer_idx, 1, even, even, [num_chosen - 1]).shape == (num_experts,)
        calibration.observe(layer_idx, [0])


def test_outcomes_count_in_batches() -> None:
    calibration = calibration_of()
    p = np.full(NUM_EXPERTS, 0.9)
    for visit in range(BATCH_VISITS):
        assert calibration.coefficients(0, 1) == START_COEFFICIENTS, visit
        calibration.calibrate(0, 1, p, p)
        calibration.observe(0, [])
    assert calibration.coefficients(0, 1) != START_COEFFICIENTS


def test_only_the_latest_forecast_of_a_lookahead_is_scored_and_only_once() -> None:
    calibration = calibration_of()
    p = np.full(NUM_EXPERTS, 0.5)
    for _ in range(3 * BATCH_VISITS):
        calibration.calibrate(0, 1, p, p)
    calibration.observe(0, [1])
    for _ in range(3 * BATCH_VISITS):
        calibration.observe(0, [1])
    assert calibration.coefficients(0, 1) == START_COEFFICIENTS


def test_a_visit_that_says_nothing_drops_its_forecasts() -> None:
    calibration = calibration_of()
    p = np.full(NUM_EXPERTS, 0.9)
    for _ in range(2 * BATCH_VISITS):
        calibration.calibrate(0, 1, p, p)
        calibration.observe(0, None)
        calibration.observe(0, [])
    assert calibration.coefficients(0, 1) == START_COEFFICIENTS


@pytest.mark.parametrize("used", [[], list(range(NUM_EXPERTS))])
def test_coefficients_stay_bounded(used: list[int]) -> None:
    calibration = calibration_of()
    rng = np.random.default_rng(0)
    for _ in range(500):
        calibration.calibrate(0, 1, rng.choice([0.0, 1.0], NUM_EXPERTS), rng.choice([0.001, 0.999], NUM_EXPERTS))
        calibration.observe(0, used)
    assert np.isfinite(calibration.coefficients(0, 1)).all()
    assert np.abs(calibration.coefficients(0, 1)).max() <= 2 * MAX_COEFFICIENT  # the layer's own and all layers'
