"""One visit of one MoE layer: which of its experts may run now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .cache import LOADING, RESIDENT

if TYPE_CHECKING:
    from .fetch_queue import FetchQueue


class Visit:
    """What one layer needs in one forward pass: begun by `Scheduler.begin_visit`, ended by `close`.

    Experts go needed -> granted (pinned) -> ready (resident) -> released. Call all methods with the scheduler's lock
    held. There are never more grants than slots, and a visit that holds a grant never waits for another one, so visits
    of several threads cannot block each other.
    """

    __slots__ = ("_base", "_caches", "_granted", "_needed", "layer_idx", "scheduler")

    def __init__(self, scheduler: FetchQueue, layer_idx: int, ids: Sequence[int]) -> None:
        assert len(set(ids)) == len(ids), f"experts of a visit are distinct, got {ids}"
        self.layer_idx = layer_idx
        self.scheduler = scheduler
        self._caches = scheduler.caches_by_code
        self._base = layer_idx * scheduler.max_experts
        self._needed = [self._base + expert_idx for expert_idx in ids]
        self._granted: dict[int, None] = {}  # pinned, not yet released, in order of execution

    @property
    def finished(self) -> bool:
        """Whether all needed experts were granted and released."""
        return not self._needed and not self._granted

    @property
    def holds_grants(self) -> bool:
        """Whether an expert is granted and not yet released. It will become ready without further grants."""
        return bool(self._granted)

    @property
    def num_granted(self) -> int:
        """The number of experts granted and not yet released."""
        return len(self._granted)

    def admit(self) -> int:
        """Grant as many needed experts as there may be pins: pin them, and demand those that are absent.

        They are granted, and so fetched, in this order: resident, in flight (the most advanced first), the rest; each kind
        in the order of the visit's ids. Without `reorder`: by id, up to and including the first that is missing, and only
        when nothing is granted.

        Returns:
            How many were granted.
        """
        if not self._needed:
            return 0
        caches, granted = self._caches, []
        for code in self._by_state() if self.scheduler.config.reorder else self._next_by_id():
            cache = caches[code]
            # An expert that another visit has pinned takes no further slot.
            if cache.pins[code] or cache.num_pinned < cache.num_slots:
                cache.pin(code)
                granted.append(code)
        self._granted.update(dict.fromkeys(granted))
        left = len(granted) < len(self._needed)
        self._needed = [code for code in self._needed if code not in self._granted] if left else []
        self.scheduler.demand(self.layer_idx, granted)
        return len(granted)

    def _by_state(self) -> list[int]:
        caches = self._caches
        resident = [code for code in self._needed if caches[code].state[code] == RESIDENT]
        if len(resident) == len(self._needed):
            return resident
        loading = [code for code in self._needed if caches[code].state[code] == LOADING]
        loading.sort(key=lambda code: caches[code].loads[code].issued, reverse=True)
        absent = [code for code in self._needed if caches[code].state[code] not in (LOADING, RESIDENT)]
        return resident + loading + absent

    def _next_by_id(self) -> list[int]:
        if self._granted:
            return []
        self._needed.sort()
        missing = (idx for idx, code in enumerate(self._needed) if self._caches[code].state[code] != RESIDENT)
        return self._needed[: next(missing, len(self._needed)) + 1]

    def ready(self) -> list[int]:
        """Return the ids of the experts that are granted and resident now: the next group to run."""
        caches, base = self._caches, self._base
        return [code - base for code in self._granted if caches[code].state[code] == RESIDENT]

    def begun(self) -> list[int]:
        """Return the ids of granted experts that are still loading, and whose `first_chunks` have arrived.

        These chunks stay until the expert is resident or `failed`: nothing takes the slot of a pinned expert.
        """
        caches, base, first = self._caches, self._base, self.scheduler.first_chunks
        return [
            code - base
            for code in self._granted
            if first[code] and caches[code].state[code] == LOADING and caches[code].loads[code].has_first(first[code])
        ]

    def slot(self, expert_idx: int) -> int:
        """Return the slot of a granted expert that is resident or `begun`."""
        code = self._base + expert_idx
        assert code in self._granted, f"expert {expert_idx} of layer {self.layer_idx} is not granted to this visit"
        cache = self._caches[code]
        if (slot := cache.slot_of.get(code)) is None:
            assert expert_idx in self.begun(), f"expert {expert_idx} of layer {self.layer_idx} is not there"
            slot = cache.loads[code].slot
        return slot

    def failed(self) -> list[int]:
        """Return the ids of granted experts whose fetch failed: they will not become ready."""
        failures = self.scheduler.failures
        return [code - self._base for code in self._granted if code in failures] if failures else []

    def release(self, expert_ids: Iterable[int]) -> None:
        """Unpin experts that have run: they may be evicted."""
        codes = [self._base + expert_idx for expert_idx in expert_ids]
        for code in codes:
            del self._granted[code]
        self.scheduler.undemand(codes)

    def close(self) -> None:
        """Release every granted expert, whether it ran or not. Closing twice is allowed."""
        self._needed = []
        if self._granted:
            codes = list(self._granted)
            self._granted.clear()
            self.scheduler.undemand(codes)
