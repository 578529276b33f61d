"""Decides, by measuring, whether prefetch is on: it must never make decoding slower than no prefetch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

# Decode passes per trial. A round is with, without, without, with prefetch (or the other way round), so that a drift hits
# both alike.
TRIAL_PASSES = 6
ROUND_TRIALS = 4
# A test ends when the difference is clear, or after so many rounds.
MOST_ROUNDS = 4
CLEAR_ERRORS = 2.0
# Prefetch can save no more than what is waited for without it, and costs something. Where that is less, there is no test.
LEAST_STALL_SHARE = 0.08
# Passes that a first verdict holds; doubled each time it is confirmed.
FIRST_HOLD_PASSES = 240
MAX_HOLD_PASSES = 4000
# The first passes of a setting still see what the other one left behind.
SETTLING_PASSES = 2


class Governor:
    """A running A/B test. Pure: told durations, answers on or off.

    It alternates trials with prefetch on and off until one's median pass is clearly shorter, keeps that for a while, and tests
    again. A verdict that is confirmed holds twice as long, so the price of testing falls towards zero. How long a test is
    depends on what there is to lose: a large difference is clear after a round, and a small one costs little. Where next to
    nothing is waited for without prefetch, it ends with the first trial that shows this.
    """

    def __init__(self) -> None:
        self.on = True
        self._hold = 0
        self._next_hold = FIRST_HOLD_PASSES
        self._verdict: bool | None = None
        self._begin_test()

    def pass_ended(self, duration_s: float, stall_s: float) -> bool:
        """A decode pass took `duration_s`, `stall_s` of it waiting, under the present setting; returns that for the next."""
        if self._hold > 0:
            self._hold -= 1
            if self._hold == 0:
                self._begin_test()
            return self.on
        self._position += 1
        if self._position > self._settling:
            self._durations[self.on].append(duration_s)
            if not self.on:
                self._stall_shares.append(stall_s / duration_s if duration_s else 0.0)
        if self._position == TRIAL_PASSES:
            self._trial_ended()
        return self.on

    def _begin_test(self) -> None:
        self._durations: dict[bool, list[float]] = {True: [], False: []}
        self._stall_shares: list[float] = []  # without prefetch
        self._first = self.on
        self._trial = self._position = 0
        self._settling = SETTLING_PASSES

    def _trial_ended(self) -> None:
        self._trial += 1
        self._position = 0
        if not self.on and median(self._stall_shares) < LEAST_STALL_SHARE:
            self._keep(False)
            return
        place = self._trial % ROUND_TRIALS
        if place == 0 and (self._trial == MOST_ROUNDS * ROUND_TRIALS or self._is_clear()):
            self._keep(median(self._durations[True]) < median(self._durations[False]))
            return
        following = self._first if place in (0, ROUND_TRIALS - 1) else not self._first
        self._settling = SETTLING_PASSES if following != self.on else 0
        self.on = following

    def _is_clear(self) -> bool:
        with_s, without_s = self._durations[True], self._durations[False]
        error_s = math.hypot(_error_of_median(with_s), _error_of_median(without_s))
        return abs(median(with_s) - median(without_s)) > CLEAR_ERRORS * error_s

    def _keep(self, on: bool) -> None:
        self.on = on
        self._next_hold = FIRST_HOLD_PASSES if self.on != self._verdict else min(2 * self._next_hold, MAX_HOLD_PASSES)
        self._verdict = self.on
        self._hold = self._next_hold


def _error_of_median(values: Sequence[float]) -> float:
    """Standard error of the median of normal values, from their median absolute deviation: outliers do not widen it."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values))
