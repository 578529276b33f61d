"""What prefetch may cost in bytes: how sure a forecast has to be, so that little is fetched in vain."""

from __future__ import annotations


class WasteBudget:
    """A share of all bytes moved may be wasted by prefetch; the nearer it is to that, the surer a forecast has to be.

    Bytes compete with what is urgent for the link, and on a CPU with computing for memory and cores, so that what a forecast of
    one half gains in time when it is right is lost again when it is wrong.

    Args:
        least: probability from which speculation is sent while nothing is owed.
        share: of the bytes moved; 1 sets no limit.
        span_bytes: wasted beyond the share, so many are the most that is remembered: then only what is certain is sent.
    """

    __slots__ = ("_debt_bytes", "_least", "_share", "_span_bytes")

    def __init__(self, least: float, share: float, span_bytes: int) -> None:
        self._least = least
        self._share = share
        self._span_bytes = span_bytes
        self._debt_bytes = 0.0

    def moved(self, nbytes: int) -> None:
        """Bytes arrived, for whatever cause."""
        self._debt_bytes = max(0.0, self._debt_bytes - self._share * nbytes)

    def wasted(self, nbytes: int) -> None:
        """Bytes that speculation had moved turned out to be in vain."""
        self._debt_bytes = min(float(self._span_bytes), self._debt_bytes + nbytes)

    @property
    def threshold(self) -> float:
        """The least probability that is worth sending now."""
        if self._share >= 1.0:
            return self._least
        return min(1.0, self._least + (1.0 - self._least) * self._debt_bytes / self._span_bytes)
