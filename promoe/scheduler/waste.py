"""Accounts for fetched bytes: which of them were used, which were wasted, and how much waste prefetch may still cause.

By default at most 2.5% of the moved bytes may be wasted (`PromoeConfig.waste_share`). Next-use eviction saves more than
that over LRU, so with prefetch the default moves no more bytes than LRU does. docs/benchmarks.md (Experts packed
beforehand) says what a larger budget gains.
"""

from __future__ import annotations

from .config import Cause, Observer


class WasteBudget:
    """The share of all moved bytes that prefetch may waste.

    The closer the waste comes to that share, the more probable an expert must be to be prefetched. Prefetched bytes
    compete with urgent ones for the link, and on a CPU with computing for memory and cores. So a forecast of one half
    loses as much when it is wrong as it gains when it is right.

    Args:
        least: the probability from which experts are prefetched while there is no debt.
        share: the allowed share of the bytes moved; 1 sets no limit.
        span_bytes: the largest debt that is remembered, in bytes wasted beyond the share. At this debt, only experts
            with probability 1 are prefetched.
    """

    __slots__ = ("_debt_bytes", "_least", "_share", "_span_bytes")

    def __init__(self, least: float, share: float, span_bytes: int) -> None:
        self._least = least
        self._share = share
        self._span_bytes = span_bytes
        self._debt_bytes = 0.0

    def moved(self, nbytes: int) -> None:
        """Count bytes that arrived, for whatever cause."""
        self._debt_bytes = max(0.0, self._debt_bytes - self._share * nbytes)

    def wasted(self, nbytes: int) -> None:
        """Count prefetched bytes that were never used."""
        self._debt_bytes = min(float(self._span_bytes), self._debt_bytes + nbytes)

    @property
    def threshold(self) -> float:
        """The lowest probability that is worth a prefetch now."""
        if self._share >= 1.0:
            return self._least
        return min(1.0, self._least + (1.0 - self._least) * self._debt_bytes / self._span_bytes)


class FetchedBytes:
    """Remembers, per expert, the bytes that arrived since a visit last asked for it, and reports what became of them.

    Prefetched bytes are either used, wasted or still pending; none is counted twice or lost.

    Args:
        observer: counts what is reported.
        budget: the budget for waste; kept up to date.
    """

    def __init__(self, observer: Observer, budget: WasteBudget) -> None:
        self.observer = observer
        self._budget = budget
        self._unasked: dict[int, dict[Cause, int]] = {}  # code -> bytes by cause

    def arrived(self, layer_idx: int, code: int, cause: Cause, nbytes: int, pinned: bool) -> None:
        """Count bytes that arrived in their expert's slot. `pinned` says whether a visit has pinned the expert."""
        self.observer.transferred(layer_idx, cause, nbytes)
        self._budget.moved(nbytes)
        if not pinned:
            by_cause = self._unasked.setdefault(code, {"demand": 0, "prefetch": 0})
            by_cause[cause] += nbytes
        elif cause == "prefetch":
            self.observer.prefetch_used(layer_idx, nbytes)

    def arrived_late(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """Count bytes that arrived after their expert had lost its slot."""
        self.observer.transferred(layer_idx, cause, nbytes)
        self._budget.moved(nbytes)
        self._wasted(layer_idx, cause, nbytes)

    @property
    def has_unasked(self) -> bool:
        """Whether there are bytes that no visit has asked for. If not, `asked` has nothing to do."""
        return bool(self._unasked)

    def asked(self, layer_idx: int, code: int) -> None:
        """Count the expert's bytes as used: a visit pinned it."""
        by_cause = self._unasked.pop(code, None)
        if by_cause and by_cause["prefetch"]:
            self.observer.prefetch_used(layer_idx, by_cause["prefetch"])

    def dropped(self, layer_idx: int, code: int) -> None:
        """Count the expert's unused bytes as wasted: it lost its slot."""
        by_cause = self._unasked.pop(code, None)
        if by_cause is None:
            return
        for cause, nbytes in by_cause.items():
            if nbytes:
                self._wasted(layer_idx, cause, nbytes)

    def _wasted(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        self.observer.wasted(layer_idx, nbytes, cause)
        if cause == "prefetch":
            self._budget.wasted(nbytes)

    def pending_bytes(self) -> int:
        """Return the prefetched bytes in slots that no visit has asked for yet."""
        return sum(by_cause["prefetch"] for by_cause in self._unasked.values())
