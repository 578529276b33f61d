"""Counts which experts were needed when, in a bounded number of stretches, however long a run becomes.

A stretch is a number of decode passes. When there are too many stretches, neighbours are joined, and each becomes twice
as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add, sub

from promoe.stats.records import combined

MAX_STRETCHES = 48


@dataclass(frozen=True)
class Stretch:
    """Consecutive decode passes, counted together. A pass is a token of each sequence."""

    passes: int = 0
    """The number of passes, including those that ended with an error."""
    needed: int = 0
    """Experts needed, summed over layers and passes."""
    hits: int = 0
    """Of these, how many were resident when the gate had chosen them."""
    ready: int = 0
    """Of these, how many had arrived when the layer came to compute them (hits included)."""
    expert_counts: tuple[int, ...] = ()
    """The number of visits that needed each expert, layer after layer, `[sum(num_experts)]`."""

    def plus(self, other: Stretch) -> Stretch:
        """Return both stretches as one."""
        return combined(add, self, other)


class OverTime:
    """Cuts a run into stretches. It reads the counters at the end of each stretch only.

    Args:
        count: returns everything counted so far as one stretch; is passed the number of passes.
    """

    def __init__(self, count: Callable[[int], Stretch]) -> None:
        self._count = count
        self._passes_per_stretch = 1
        self._begun = 0
        self._closed: list[Stretch] = []
        self._pairs_left = 0  # still to be joined
        self._before = count(0)  # counted before the open stretch

    def pass_begins(self) -> None:
        """Count a pass. Call it before anything else of the pass is counted."""
        if self._pairs_left:
            self._join_next()
        if self._begun - self._before.passes == self._passes_per_stretch:
            self._close()
        self._begun += 1

    def _close(self) -> None:
        now = self._count(self._begun)
        self._closed.append(combined(sub, now, self._before))
        self._before = now
        if len(self._closed) - self._pairs_left == MAX_STRETCHES:
            # One pair per pass: joining all at once would slow down one pass.
            self._pairs_left = MAX_STRETCHES // 2
            self._passes_per_stretch *= 2

    def stretches(self) -> tuple[Stretch, ...]:
        """Return all stretches, the last one as far as it has come; at most MAX_STRETCHES."""
        while self._pairs_left:  # kept: a caller that asks ten times in a second would have them joined each time
            self._join_next()
        open_one = combined(sub, self._count(self._begun), self._before)
        return (*self._closed, open_one) if open_one.passes else tuple(self._closed)

    def _join_next(self) -> None:
        first = MAX_STRETCHES // 2 - self._pairs_left  # those before it are joined
        self._closed[first : first + 2] = [self._closed[first].plus(self._closed[first + 1])]
        self._pairs_left -= 1
