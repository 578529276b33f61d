"""One pass of tokens through one MoE layer: which of its experts may run now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .cache import LOADING, RESIDENT

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Visit:
    """The authority on what a layer needs: created by `Scheduler.begin_visit`, ended by `close`.

    Experts go needed -> granted (pinned) -> ready (resident) -> released. All methods are called with the scheduler's
    lock held. Grants never exceed the slots, and a visit that holds a grant never waits for a further one, so visits
    of several threads cannot block each other.
    """

    __slots__ = ("_base", "_cache", "_granted", "_needed", "layer_idx", "scheduler")

    def __init__(self, scheduler: Scheduler, layer_idx: int, ids: Sequence[int]) -> None:
        assert len(set(ids)) == len(ids), f"experts of a visit are distinct, got {ids}"
        self.layer_idx = layer_idx
        self.scheduler = scheduler
        self._cache = scheduler.cache_of(layer_idx)
        self._base = layer_idx * scheduler.max_experts
        self._needed = [self._base + expert_idx for expert_idx in ids]
        self._granted: dict[int, None] = {}  # pinned, not yet released, in order of execution

    @property
    def finished(self) -> bool:
        """Everything needed was granted and released."""
        return not self._needed and not self._granted

    @property
    def holds_grants(self) -> bool:
        """Some expert is granted and not yet released: it will become ready without further grants."""
        return bool(self._granted)

    @property
    def num_granted(self) -> int:
        """Experts granted and not yet released."""
        return len(self._granted)

    def admit(self) -> int:
        """Grant (pin, and demand where absent) as many needed experts as there may be pins; returns how many.

        Order of grants, and so of fetching: resident, in flight (most done first), rest. Without `reorder`: ascending
        ids, up to and including the first that is missing, and only when nothing is granted.
        """
        if not self._needed:
            return 0
        cache = self._cache
        granted = []
        for code in self._by_state() if self.scheduler.config.reorder else self._next_by_id():
            # What another visit has pinned takes no further slot.
            if cache.pins[code] or cache.num_pinned < cache.num_slots:
                cache.pin(code)
                granted.append(code)
        self._granted.update(dict.fromkeys(granted))
        left = len(granted) < len(self._needed)
        self._needed = [code for code in self._needed if code not in self._granted] if left else []
        self.scheduler.demand(self.layer_idx, granted)
        return len(granted)

    def _by_state(self) -> list[int]:
        state, loads = self._cache.state, self._cache.loads
        resident = [code for code in self._needed if state[code] == RESIDENT]
        if len(resident) == len(self._needed):
            return resident
        loading = [code for code in self._needed if state[code] == LOADING]
        loading.sort(key=lambda code: loads[code].issued, reverse=True)
        return resident + loading + [code for code in self._needed if state[code] not in (LOADING, RESIDENT)]

    def _next_by_id(self) -> list[int]:
        if self._granted:
            return []
        self._needed.sort()
        missing = (idx for idx, code in enumerate(self._needed) if self._cache.state[code] != RESIDENT)
        return self._needed[: next(missing, len(self._needed)) + 1]

    def ready(self) -> list[int]:
        """Expert ids that are granted and resident now: the next group to run."""
        state, base = self._cache.state, self._base
        return [code - base for code in self._granted if state[code] == RESIDENT]

    def begun(self) -> list[int]:
        """Expert ids that are granted, still loading, and there as far as is enough to begin (`first_chunks`).

        What is there of them stays until they are resident or `failed`: nothing takes the slot of a pinned expert.
        """
        first = self.scheduler.config.first_chunks[self.layer_idx]
        if not first:
            return []
        state, loads, base = self._cache.state, self._cache.loads, self._base
        return [code - base for code in self._granted if state[code] == LOADING and loads[code].has_first(first)]

    def slot(self, expert_idx: int) -> int:
        """The slot of a granted expert that is resident or `begun`."""
        code = self._base + expert_idx
        assert code in self._granted, f"expert {expert_idx} of layer {self.layer_idx} is not granted to this visit"
        if (slot := self._cache.slot_of.get(code)) is None:
            assert expert_idx in self.begun(), f"expert {expert_idx} of layer {self.layer_idx} is not there"
            slot = self._cache.loads[code].slot
        return slot

    def failed(self) -> list[int]:
        """Granted experts whose fetch failed: they will not become ready."""
        failures = self.scheduler.failures
        return [code - self._base for code in self._granted if code in failures] if failures else []

    def release(self, expert_ids: Iterable[int]) -> None:
        """The group has run; its experts may be evicted."""
        codes = [self._base + expert_idx for expert_idx in expert_ids]
        for code in codes:
            del self._granted[code]
        self.scheduler.undemand(codes, self._cache)

    def close(self) -> None:
        """Give back every grant, whether it ran or not. Safe to repeat."""
        self._needed = []
        if self._granted:
            codes = list(self._granted)
            self._granted.clear()
            self.scheduler.undemand(codes, self._cache)
