"""Decides by measuring whether prefetch is on, so that decoding is never slower than without prefetch.

It compares passes as if all had fetched the same number of bytes, because what a token happens to need changes the
duration of a pass several times as much as prefetch does. In tests of two rounds, plain durations found the gain half of
the time, and this comparison found it 83% of the time (docs/benchmarks.md, Is prefetch worth it).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Decode passes per trial. A round is with, without, without, with prefetch (or the other way round), so that a drift
# affects both alike.
TRIAL_PASSES = 6
ROUND_TRIALS = 4
# A test ends when the difference is clear, or after MOST_ROUNDS.
MOST_ROUNDS = 4
CLEAR_ERRORS = 2.0
# Prefetch can save no more than the stall without it, and it costs something. Below the first share of stall there is no
# test; above the second, which is clearly more, the next test begins.
LEAST_STALL_SHARE, RENEWED_STALL_SHARE = 0.08, 0.12
# A first verdict holds for this many passes; twice as long each time it is confirmed.
FIRST_HOLD_PASSES = 240
MAX_HOLD_PASSES = 4000
# The first passes with a setting still depend on what the other one left in the cache; they are not counted.
SETTLING_PASSES = 2
# While there was nothing to win, the stall of this many latest passes is watched.
WATCHED_PASSES = 12


class Pass(NamedTuple):
    """A decode pass."""

    duration_s: float
    fetched_bytes: float
    """Bytes of the experts that it used and that were not there before, fetched on demand or ahead of need."""


Floats = npt.NDArray[np.float64]


class Governor:
    """A running A/B test. It is told how long passes took, and answers on or off.

    It alternates trials with prefetch on and off until the typical pass of one is clearly shorter, keeps that setting for a
    while, and tests again. A verdict that is confirmed holds twice as long, so the cost of testing falls towards zero. A
    large difference is clear after one round, and a small one costs little while it is tested. If there is next to no
    stall without prefetch, the test ends without a verdict: prefetch stays off, the stall is watched, and once there is
    some, the next test begins.

    The duration of a pass depends most of all on how many of its experts have to be fetched. That differs from token to
    token by far more than prefetch gains, and prefetch hardly changes it. So passes are compared as if all had fetched the
    same number of bytes. (An expert that is fetched again because a prefetch evicted it is not charged to prefetch.)
    """

    def __init__(self) -> None:
        self.on = True
        self._hold = 0
        self._next_hold = FIRST_HOLD_PASSES
        self._verdict: bool | None = None
        self._watched: deque[float] | None = None  # stall shares of the latest passes, while there is nothing to win
        self._begin_test()

    def pass_ended(self, duration_s: float, stall_s: float, fetched_bytes: float) -> bool:
        """Record a decode pass with the present setting. Returns the setting for the next one.

        Args:
            duration_s: how long the pass took.
            stall_s: how long it waited for experts.
            fetched_bytes: see `Pass`.
        """
        stall_share = stall_s / duration_s if duration_s else 0.0
        if self._watched is not None:
            self._watched.append(stall_share)
            if len(self._watched) == WATCHED_PASSES and median(self._watched) >= RENEWED_STALL_SHARE:
                self._begin_test()
            return self.on
        if self._hold > 0:
            self._hold -= 1
            if self._hold == 0:
                self._begin_test()
            return self.on
        self._position += 1
        if self._position > self._settling:
            self._passes[self.on].append(Pass(duration_s, fetched_bytes))
            if not self.on:
                self._stall_shares.append(stall_share)
        if self._position >= TRIAL_PASSES:  # beyond it, if Ctrl-C came as a trial ended
            self._trial_ended()
        return self.on

    def _begin_test(self) -> None:
        self._passes: dict[bool, list[Pass]] = {True: [], False: []}
        self._stall_shares: list[float] = []  # without prefetch
        self._watched = None
        self._first = self.on
        self._trial = self._position = 0
        self._settling = SETTLING_PASSES

    def _trial_ended(self) -> None:
        self._trial += 1
        self._position = 0
        place = self._trial % ROUND_TRIALS
        if place == 0:
            saved_s, error_s = saved(self._passes[True], self._passes[False])
            if self._trial >= MOST_ROUNDS * ROUND_TRIALS or abs(saved_s) > CLEAR_ERRORS * error_s:
                self._keep(saved_s > 0.0)
                return
        if not self.on and median(self._stall_shares) < LEAST_STALL_SHARE:
            self._watched = deque(maxlen=WATCHED_PASSES)
            return
        following = self._first if is_as_first(self._trial) else not self._first
        self._settling = SETTLING_PASSES if following != self.on else 0
        self.on = following

    def _keep(self, on: bool) -> None:
        self.on = on
        self._next_hold = FIRST_HOLD_PASSES if self.on != self._verdict else min(2 * self._next_hold, MAX_HOLD_PASSES)
        self._verdict = self.on
        self._hold = self._next_hold


def is_as_first(trial: int) -> bool:
    """Return whether trial number `trial` of a test, from 0, has the same setting as the first one."""
    return trial % ROUND_TRIALS in (0, ROUND_TRIALS - 1)


def saved(with_prefetch: Sequence[Pass], without: Sequence[Pass]) -> tuple[float, float]:
    """Return the seconds that prefetch saves in a typical pass, and their standard error.

    Passes are compared as if all had fetched the same number of bytes.
    """
    groups = [np.array(passes, dtype=np.float64).T for passes in (with_prefetch, without)]
    slope = seconds_per_byte(groups)
    with_s, without_s = (durations - slope * fetched for durations, fetched in groups)
    error_s = math.hypot(_error_of_median(with_s), _error_of_median(without_s))
    return float(np.median(without_s) - np.median(with_s)), error_s


def seconds_per_byte(groups: Sequence[Floats]) -> float:
    """Return how much longer a pass takes for each additional byte that it fetches.

    This is the median over all pairs of passes of a group (the Theil-Sen estimator): a few passes that took much longer
    for other reasons do not change it.

    Args:
        groups: per group, durations and bytes `[2, num_passes]`.
    """
    slopes = []
    for durations, fetched in groups:
        more_bytes = fetched[:, None] - fetched
        longer_s = durations[:, None] - durations
        slopes.append(longer_s[more_bytes > 0] / more_bytes[more_bytes > 0])
    found = np.concatenate(slopes)
    return max(0.0, float(np.median(found))) if len(found) else 0.0


def scatter(values: Floats) -> float:
    """Return the standard deviation of normal values, estimated from their median absolute deviation: robust to outliers."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _error_of_median(values: Floats) -> float:
    """Return the standard error of the median of normal values."""
    return math.sqrt(math.pi / 2) * scatter(values) / math.sqrt(len(values))
