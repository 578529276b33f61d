"""What became of every fetched byte: a visit asked for its expert, or it was moved in vain."""

from __future__ import annotations

from .budget import WasteBudget
from .config import Cause, Observer


class Ledger:
    """Tells the observer; remembers, per expert, what arrived since a visit last asked for it.

    Prefetched bytes are either used, wasted or still pending: nothing is counted twice or lost.

    Args:
        observer: is told.
        budget: of what prefetch may waste; kept up to date.
    """

    def __init__(self, observer: Observer, budget: WasteBudget) -> None:
        self.observer = observer
        self._budget = budget
        self._unasked: dict[int, dict[Cause, int]] = {}  # code -> bytes by cause

    def arrived(self, layer_idx: int, code: int, cause: Cause, nbytes: int, pinned: bool) -> None:
        """Bytes are in the slot of an expert that some visit has pinned, or not."""
        self.observer.transferred(layer_idx, cause, nbytes)
        self._budget.moved(nbytes)
        if not pinned:
            by_cause = self._unasked.setdefault(code, {"demand": 0, "prefetch": 0})
            by_cause[cause] += nbytes
        elif cause == "prefetch":
            self.observer.prefetch_used(layer_idx, nbytes)

    def arrived_late(self, layer_idx: int, cause: Cause, nbytes: int) -> None:
        """Bytes are in a slot that its expert has lost."""
        self.observer.transferred(layer_idx, cause, nbytes)
        self._budget.moved(nbytes)
        self._wasted(layer_idx, cause, nbytes)

    @property
    def has_unasked(self) -> bool:
        """Whether there is an expert of which `asked` would learn anything."""
        return bool(self._unasked)

    def asked(self, layer_idx: int, code: int) -> None:
        """A visit pinned the expert."""
        by_cause = self._unasked.pop(code, None)
        if by_cause and by_cause["prefetch"]:
            self.observer.prefetch_used(layer_idx, by_cause["prefetch"])

    def dropped(self, layer_idx: int, code: int) -> None:
        """The expert lost its slot."""
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
        """Prefetched bytes in slots that no visit asked for yet."""
        return sum(by_cause["prefetch"] for by_cause in self._unasked.values())
