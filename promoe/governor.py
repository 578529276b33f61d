"""Decides, by measuring, whether prefetch is on: it must never make decoding slower than no prefetch."""

from __future__ import annotations

from collections import deque
from statistics import median

# Decode passes per trial, alternating with and without prefetch, and pairs of trials per verdict.
TRIAL_PASSES = 6
PAIRS = 3
# Passes that a first verdict holds; doubled each time it is confirmed.
FIRST_HOLD_PASSES = 240
MAX_HOLD_PASSES = 4000
# The first passes of a trial still see what the other setting left behind.
SETTLING_PASSES = 2


class Governor:
    """A running A/B test. Pure: told durations, answers on or off.

    It alternates trials with prefetch on and off, compares the median pass of each, keeps the faster for a while, and
    tests again. A verdict that is confirmed holds twice as long, so the price of testing falls towards zero.
    """

    def __init__(self) -> None:
        self.on = True
        self._hold = 0
        self._next_hold = FIRST_HOLD_PASSES
        self._verdict: bool | None = None
        self._durations: dict[bool, deque[float]] = {}
        self._trial = 0
        self._position = 0
        self._begin_test()

    def pass_ended(self, duration_s: float) -> bool:
        """A decode pass took `duration_s` under the present setting; returns the setting for the next."""
        if self._hold > 0:
            self._hold -= 1
            if self._hold == 0:
                self._begin_test()
            return self.on
        self._position += 1
        if self._position > SETTLING_PASSES:
            self._durations[self.on].append(duration_s)
        if self._position == TRIAL_PASSES:
            self._position = 0
            self._trial += 1
            self.on = not self.on
            if self._trial == 2 * PAIRS:
                self._conclude()
        return self.on

    def _begin_test(self) -> None:
        self._durations = {True: deque(), False: deque()}
        self._trial = self._position = 0

    def _conclude(self) -> None:
        self.on = median(self._durations[True]) < median(self._durations[False])
        self._next_hold = FIRST_HOLD_PASSES if self.on != self._verdict else min(2 * self._next_hold, MAX_HOLD_PASSES)
        self._verdict = self.on
        self._hold = self._next_hold
