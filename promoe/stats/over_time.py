"""Which experts were needed when: counts in a bounded number of stretches, however long a run becomes.

A stretch is so many decode passes. When there are too many, neighbours are joined and each becomes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add, sub

MAX_STRETCHES = 48


@dataclass(frozen=True)
class Stretch:
    """Decode passes that followed each other, counted together. A pass is a token of each sequence."""

    passes: int = 0
    """How many; also those that ended with an error."""
    needed: int = 0
    """Experts needed, summed over layers and passes."""
    hits: int = 0
    """Of these, resident when the gate had chosen them."""
    ready: int = 0
    """Of these, without any wait when the layer came to compute them (hits included)."""
    expert_counts: tuple[int, ...] = ()
    """Visits that needed each expert, layer after layer, `[sum(num_experts)]`."""

    def plus(self, other: Stretch) -> Stretch:
        """Both together."""
        return self._combined(add, other)

    def minus(self, other: Stretch) -> Stretch:
        """What was counted since `other`."""
        return self._combined(sub, other)

    def _combined(self, operation: Callable[[int, int], int], other: Stretch) -> Stretch:
        return Stretch(
            operation(self.passes, other.passes),
            operation(self.needed, other.needed),
            operation(self.hits, other.hits),
            operation(self.ready, other.ready),
            tuple(map(operation, self.expert_counts, other.expert_counts)),
        )


class OverTime:
    """Cuts a run into stretches. Costs nothing but at their ends, where it looks at the counters.

    Args:
        count: everything counted so far, as one stretch; told how many passes it is of.
    """

    def __init__(self, count: Callable[[int], Stretch]) -> None:
        self._count = count
        self._passes_per_stretch = 1
        self._begun = 0
        self._closed: list[Stretch] = []
        self._pairs_left = 0  # to be joined
        self._before = count(0)  # the open stretch

    def pass_begins(self) -> None:
        """One more pass. Call it before anything of it is counted."""
        if self._pairs_left:
            self._join_next()
        if self._begun - self._before.passes == self._passes_per_stretch:
            self._close()
        self._begun += 1

    def _close(self) -> None:
        now = self._count(self._begun)
        self._closed.append(now.minus(self._before))
        self._before = now
        if len(self._closed) - self._pairs_left == MAX_STRETCHES:
            # One pair per pass, long before there are as many again: all at once would be felt in one pass.
            self._pairs_left = MAX_STRETCHES // 2
            self._passes_per_stretch *= 2

    def stretches(self) -> tuple[Stretch, ...]:
        """All of them, the last one as far as it has come; at most MAX_STRETCHES."""
        while self._pairs_left:  # joined for good: whoever looks ten times in a second would join them each time
            self._join_next()
        open_one = self._count(self._begun).minus(self._before)
        return (*self._closed, open_one) if open_one.passes else tuple(self._closed)

    def _join_next(self) -> None:
        _join(self._closed, self._pairs_left)
        self._pairs_left -= 1


def _join(stretches: list[Stretch], pairs_left: int) -> None:
    """Join the first of so many pairs; those before it are joined."""
    first = MAX_STRETCHES // 2 - pairs_left
    stretches[first : first + 2] = [stretches[first].plus(stretches[first + 1])]
