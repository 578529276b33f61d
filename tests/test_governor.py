from __future__ import annotations

from collections.abc import Callable

import pytest

from promoe.governor import (
    FIRST_HOLD_PASSES,
    MAX_HOLD_PASSES,
    PAIRS,
    SETTLING_PASSES,
    TRIAL_PASSES,
    Governor,
)

TEST_PASSES = 2 * PAIRS * TRIAL_PASSES
FAST_S, SLOW_S = 0.010, 0.013


def drive(governor: Governor, passes: int, duration_s: Callable[[bool, int], float]) -> list[bool]:
    """The setting under which each of the next passes ran; `duration_s(setting, number of the pass)`."""
    settings = []
    for number in range(passes):
        settings.append(governor.on)
        assert governor.pass_ended(duration_s(governor.on, number)) is governor.on
    return settings


def prefetch_pays(on: bool, number: int = 0) -> float:
    return FAST_S if on else SLOW_S


def prefetch_costs(on: bool, number: int = 0) -> float:
    return SLOW_S if on else FAST_S


def test_trials_alternate_and_begin_with_prefetch_on() -> None:
    settings = drive(Governor(), TEST_PASSES, prefetch_pays)
    assert settings == ([True] * TRIAL_PASSES + [False] * TRIAL_PASSES) * PAIRS


@pytest.mark.parametrize(("duration_s", "verdict"), [(prefetch_pays, True), (prefetch_costs, False)])
def test_the_faster_setting_is_kept(duration_s: Callable[[bool, int], float], verdict: bool) -> None:
    governor = Governor()
    drive(governor, TEST_PASSES, duration_s)
    assert drive(governor, FIRST_HOLD_PASSES, duration_s) == [verdict] * FIRST_HOLD_PASSES


def test_a_tie_is_no_reason_to_move_bytes() -> None:
    governor = Governor()
    drive(governor, TEST_PASSES, lambda on, number: FAST_S)
    assert governor.on is False


@pytest.mark.parametrize("verdict", [True, False])
def test_a_confirmed_verdict_holds_twice_as_long_up_to_a_limit(verdict: bool) -> None:
    duration_s = prefetch_pays if verdict else prefetch_costs
    governor, holds = Governor(), [FIRST_HOLD_PASSES]
    while holds[-1] < MAX_HOLD_PASSES:
        holds.append(min(2 * holds[-1], MAX_HOLD_PASSES))
    for hold in [*holds, MAX_HOLD_PASSES]:
        test = drive(governor, TEST_PASSES, duration_s)
        assert test.count(True) == test.count(False) == TEST_PASSES // 2
        assert set(drive(governor, hold, duration_s)) == {verdict}
    # Whatever was kept is what the next test begins with.
    assert drive(governor, 2 * TRIAL_PASSES, duration_s) == [verdict] * TRIAL_PASSES + [not verdict] * TRIAL_PASSES


def test_testing_costs_nearly_nothing_in_the_long_run() -> None:
    governor = Governor()
    drive(governor, 20_000, prefetch_costs)
    settings = drive(governor, 20_000, prefetch_costs)
    assert 0 < settings.count(True) / len(settings) < 0.01


def test_a_change_of_mind_starts_with_the_first_hold_again() -> None:
    governor = Governor()
    for hold in (FIRST_HOLD_PASSES, 2 * FIRST_HOLD_PASSES, 4 * FIRST_HOLD_PASSES):
        drive(governor, TEST_PASSES + hold, prefetch_pays)
    drive(governor, TEST_PASSES, prefetch_costs)
    assert set(drive(governor, FIRST_HOLD_PASSES, prefetch_costs)) == {False}
    test = drive(governor, TEST_PASSES, prefetch_pays)
    assert test[: 2 * TRIAL_PASSES] == [False] * TRIAL_PASSES + [True] * TRIAL_PASSES
    assert governor.on is True


def test_a_change_during_the_hold_is_seen_by_the_next_test() -> None:
    governor = Governor()
    drive(governor, TEST_PASSES, prefetch_pays)
    assert set(drive(governor, FIRST_HOLD_PASSES, prefetch_costs)) == {True}
    drive(governor, TEST_PASSES, prefetch_costs)
    assert governor.on is False


def test_the_first_passes_of_a_trial_do_not_count() -> None:
    """They still see what the other setting left behind, which here would turn the verdict."""

    def misleading(on: bool, number: int) -> float:
        position = number % TRIAL_PASSES
        if position < SETTLING_PASSES:
            return 1.0 if on else 0.0
        return 0.010 + 0.001 * position + (0.0 if on else 0.0005)  # on is a little faster, within the spread

    assert 0 < SETTLING_PASSES < TRIAL_PASSES
    governor = Governor()
    drive(governor, TEST_PASSES, misleading)
    assert governor.on is True


@pytest.mark.parametrize("verdict", [True, False])
def test_outliers_do_not_decide(verdict: bool) -> None:
    """A pass in each trial of the better setting that took a hundred times as long."""

    def with_outliers(on: bool, number: int) -> float:
        better = on is verdict
        outlier = better and number % TRIAL_PASSES == TRIAL_PASSES - 1
        return (FAST_S if better else SLOW_S) * (100 if outlier else 1)

    governor = Governor()
    drive(governor, TEST_PASSES, with_outliers)
    assert governor.on is verdict


def test_a_drift_that_hits_both_settings_does_not_decide() -> None:
    """Passes get slower as the context grows: trials in pairs see about the same of it."""
    governor = Governor()
    drive(governor, TEST_PASSES, lambda on, number: prefetch_pays(on) + 0.0002 * number)
    assert governor.on is True
