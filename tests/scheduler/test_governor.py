from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from promoe.scheduler.governor import (
    FIRST_HOLD_PASSES,
    LEAST_STALL_SHARE,
    MAX_HOLD_PASSES,
    MOST_ROUNDS,
    RENEWED_STALL_SHARE,
    ROUND_TRIALS,
    SETTLING_PASSES,
    TRIAL_PASSES,
    WATCHED_PASSES,
    Governor,
    Pass,
    saved,
    seconds_per_byte,
)

# Of a test whose outcome is clear at once, and of the longest.
TEST_PASSES = ROUND_TRIALS * TRIAL_PASSES
LONGEST_PASSES = MOST_ROUNDS * TEST_PASSES
FAST_S, SLOW_S = 0.010, 0.013
STALL_SHARE = 2 * LEAST_STALL_SHARE


def drive(
    governor: Governor,
    passes: int,
    duration_s: Callable[[bool, int], float],
    fetched_bytes: Callable[[int], float] = lambda number: 1e8,
) -> list[bool]:
    """Return the setting of each of the next passes, which take `duration_s(setting, number of the pass)`."""
    settings = []
    for number in range(passes):
        settings.append(governor.on)
        spent_s = duration_s(governor.on, number)
        assert governor.pass_ended(spent_s, STALL_SHARE * spent_s, fetched_bytes(number)) is governor.on
    return settings


def prefetch_pays(on: bool, number: int = 0) -> float:
    return FAST_S if on else SLOW_S


def prefetch_costs(on: bool, number: int = 0) -> float:
    return SLOW_S if on else FAST_S


def test_trials_alternate_and_begin_with_prefetch_on() -> None:
    settings = drive(Governor(), 2 * TEST_PASSES, lambda on, number: FAST_S)
    one = [True] * TRIAL_PASSES + [False] * 2 * TRIAL_PASSES + [True] * TRIAL_PASSES
    assert settings == one * 2


@pytest.mark.parametrize(("duration_s", "verdict"), [(prefetch_pays, True), (prefetch_costs, False)])
def test_the_faster_setting_is_kept(duration_s: Callable[[bool, int], float], verdict: bool) -> None:
    governor = Governor()
    drive(governor, TEST_PASSES, duration_s)
    assert drive(governor, FIRST_HOLD_PASSES, duration_s) == [verdict] * FIRST_HOLD_PASSES


def test_a_tie_is_no_reason_to_move_bytes() -> None:
    governor = Governor()
    drive(governor, LONGEST_PASSES, lambda on, number: FAST_S)
    assert set(drive(governor, FIRST_HOLD_PASSES, lambda on, number: FAST_S)) == {False}


def noisy(difference: float, seed: int) -> Callable[[bool, int], float]:
    """Return durations of about 10 ms (1.5 ms more or less), so much shorter with prefetch."""
    draw = random.Random(seed)
    return lambda on, number: 0.010 + draw.gauss(0.0, 0.0015) - (difference if on else 0.0)


@pytest.mark.parametrize("pays", [True, False])
def test_a_large_difference_is_clear_sooner_than_a_small_one(pays: bool) -> None:
    def passes_until_held(difference: float, seed: int) -> int:
        governor, duration_s = Governor(), noisy(difference if pays else -difference, seed)
        settings = drive(governor, LONGEST_PASSES + 1, duration_s)
        changes = [number for number in range(1, len(settings)) if settings[number] != settings[number - 1]]
        assert settings[LONGEST_PASSES] is pays
        return changes[-1]

    large = [passes_until_held(0.006, seed) for seed in range(20)]
    small = [passes_until_held(0.0015, seed) for seed in range(20)]
    assert sum(large) / 20 < TEST_PASSES + TRIAL_PASSES < sum(small) / 20


def test_a_small_difference_is_usually_seen() -> None:
    """5% of a pass whose spread is 15%: few passes would be a coin's throw."""
    right = 0
    for seed in range(200):
        governor = Governor()
        pays = seed % 2 == 0
        drive(governor, LONGEST_PASSES, noisy(0.0005 if pays else -0.0005, seed))
        right += governor.on is pays
    assert right >= 150


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
    assert drive(governor, 3 * TRIAL_PASSES, duration_s) == [verdict] * TRIAL_PASSES + [not verdict] * 2 * TRIAL_PASSES


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
    """They depend on what the other setting left in the cache, which here would reverse the verdict."""

    def misleading(on: bool, number: int) -> float:
        settings.append(on)
        since = next((back for back, other in enumerate(reversed(settings)) if other is not on), len(settings))
        if since <= SETTLING_PASSES:
            return 1.0 if on else 0.0
        return (
            0.010 + 0.001 * (number % TRIAL_PASSES) + (0.0 if on else 0.0005)
        )  # on is a little faster, within the spread

    assert 0 < SETTLING_PASSES < TRIAL_PASSES
    settings: list[bool] = []
    governor = Governor()
    drive(governor, LONGEST_PASSES, misleading)
    assert governor.on is True


@pytest.mark.parametrize("verdict", [True, False])
def test_outliers_do_not_decide(verdict: bool) -> None:
    """In each trial of the better setting, one pass takes a hundred times as long."""

    def with_outliers(on: bool, number: int) -> float:
        better = on is verdict
        outlier = better and number % TRIAL_PASSES == TRIAL_PASSES - 1
        return (FAST_S if better else SLOW_S) * (100 if outlier else 1)

    governor = Governor()
    drive(governor, LONGEST_PASSES, with_outliers)
    assert governor.on is verdict


def test_a_drift_that_hits_both_settings_does_not_decide() -> None:
    """Passes get slower as the context grows: paired trials are affected about equally."""
    governor = Governor()
    drive(governor, LONGEST_PASSES, lambda on, number: prefetch_pays(on) + 0.0002 * number)
    assert governor.on is True


def test_where_nothing_is_waited_for_there_is_nothing_to_win() -> None:
    """Without a test: one trial with prefetch, before anything was known, and one without it."""
    governor = Governor()
    settings = []
    for _ in range(3 * TRIAL_PASSES + FIRST_HOLD_PASSES):
        settings.append(governor.on)
        spent_s = FAST_S if governor.on else SLOW_S
        governor.pass_ended(spent_s, 0.0 if governor.on else 0.5 * LEAST_STALL_SHARE * SLOW_S, 1e8)
    assert settings == [True] * TRIAL_PASSES + [False] * (len(settings) - TRIAL_PASSES)
    for _ in range(10 * MAX_HOLD_PASSES):
        assert governor.pass_ended(SLOW_S, 0.0, 0.0) is False


def pass_many(governor: Governor, passes: int, stall_share: float) -> list[bool]:
    settings = []
    for _ in range(passes):
        settings.append(governor.on)
        governor.pass_ended(FAST_S, stall_share * FAST_S, 1e8)
    return settings


def test_where_there_was_nothing_to_win_waiting_is_watched() -> None:
    """For example, repetitive text needs next to no fetches, and the text after it does."""
    governor = Governor()
    pass_many(governor, 3 * TRIAL_PASSES, 0.0)
    between = (LEAST_STALL_SHARE + RENEWED_STALL_SHARE) / 2
    assert set(pass_many(governor, 10 * WATCHED_PASSES, between)) == {False}
    until = pass_many(governor, FIRST_HOLD_PASSES, 1.5 * RENEWED_STALL_SHARE).index(True)
    # Half of those watched, as their median is the mean of the middle two; then the test begins with a trial without.
    assert until == WATCHED_PASSES // 2 + TRIAL_PASSES


def test_what_ended_without_a_verdict_confirms_none() -> None:
    governor = Governor()
    for _ in range(8):
        pass_many(governor, 3 * TRIAL_PASSES, 0.0)  # nothing to win
        assert governor.on is False
        pass_many(governor, WATCHED_PASSES, 2 * RENEWED_STALL_SHARE)  # there is, says the watch
    # The test that has just begun is the first to come to a verdict.
    drive(governor, LONGEST_PASSES, prefetch_costs)
    assert governor._hold <= FIRST_HOLD_PASSES


def test_a_round_that_is_clear_is_not_thrown_away_for_want_of_waiting() -> None:
    """A round that began without prefetch ends without it: its verdict counts before the stall of its trials."""
    governor = Governor()
    pass_many(governor, 2 * TRIAL_PASSES, 0.0)
    pass_many(governor, WATCHED_PASSES, 2 * RENEWED_STALL_SHARE)
    shares = [1.0] * TRIAL_PASSES + [0.5] * 2 * TRIAL_PASSES + [0.0] * TRIAL_PASSES
    for share in shares:
        governor.pass_ended(prefetch_pays(governor.on), share * prefetch_pays(governor.on), 1e8)
    assert governor.on is True
    assert governor._hold == FIRST_HOLD_PASSES


def test_a_verdict_that_was_measured_is_not_broken_off_by_waiting() -> None:
    governor = Governor()
    drive(governor, TEST_PASSES, prefetch_costs)
    settings = [governor.pass_ended(FAST_S, 0.5 * FAST_S, 1e8) for _ in range(FIRST_HOLD_PASSES - 1)]
    assert set(settings) == {False}


def uneven(seed: int) -> Callable[[int], float]:
    """Return the bytes that passes fetch: 0 to 200 MB, at random."""
    draw = random.Random(seed)
    drawn: dict[int, float] = {}
    return lambda number: drawn.setdefault(number, draw.uniform(0.0, 2e8))


def test_a_small_difference_is_seen_though_passes_fetch_more_or_less() -> None:
    """5% of a pass whose spread is 25%, nearly all of it from what tokens happen to need."""
    right = 0
    for seed in range(100):
        governor, fetched, draw = Governor(), uneven(seed), random.Random(seed)
        pays = seed % 2 == 0

        def duration_s(on: bool, number: int, fetched=fetched, draw=draw, pays=pays) -> float:
            return 0.006 + 4e-11 * fetched(number) + draw.gauss(0.0, 0.0005) - (0.0005 if on is pays else 0.0)

        drive(governor, LONGEST_PASSES, duration_s, fetched)
        right += governor.on is pays
    assert right >= 95


@pytest.mark.parametrize("pays", [True, False])
def test_a_setting_that_met_the_heavier_tokens_is_not_blamed_for_them(pays: bool) -> None:
    def passes(count: int, base_s: float, least_bytes: float) -> list[Pass]:
        fetched = [least_bytes + 1e7 * number for number in range(count)]
        return [Pass(base_s + 1e-10 * nbytes, nbytes) for nbytes in fetched]

    fast_s, slow_s = 0.050, 0.055
    saved_s, error_s = saved(
        passes(10, fast_s if pays else slow_s, 1e8 if pays else 0.0),
        passes(10, slow_s if pays else fast_s, 0.0 if pays else 1e8),
    )
    assert saved_s == pytest.approx(0.005 if pays else -0.005)
    assert error_s == pytest.approx(0.0, abs=1e-9)


def test_seconds_per_byte() -> None:
    durations, fetched = np.array([1.0, 2.0, 3.0, 90.0]), np.array([0.0, 1.0, 2.0, 0.5])
    assert seconds_per_byte([np.stack([durations, fetched])]) == 1.0  # the outlier does not move it
    assert seconds_per_byte([np.stack([durations[:3], 2 * fetched[:3]]), np.zeros((2, 5))]) == 0.5
    assert seconds_per_byte([np.stack([-durations[:3], fetched[:3]])]) == 0.0  # more bytes take no less time
    assert seconds_per_byte([np.zeros((2, 0)), np.ones((2, 3))]) == 0.0  # all fetched as much


def test_it_goes_on_after_ctrl_c_at_the_end_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Governor) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    governor = Governor()
    monkeypatch.setattr(Governor, "_trial_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(governor, TRIAL_PASSES, prefetch_costs)
    settings = drive(governor, LONGEST_PASSES + FIRST_HOLD_PASSES // 2, prefetch_costs)
    assert not any(settings[-FIRST_HOLD_PASSES // 2 :])
