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

    __slots__ = ("_base", "_cache", "_granted", "_needed", "_scheduler", "layer_idx", "num_ready")

    def __init__(self, scheduler: Scheduler, layer_idx: int, ids: Sequence[int]) -> None:
        self.layer_idx = layer_idx
        self.num_ready = 0
        self._scheduler = scheduler
        self._cache = scheduler.cache_of(layer_idx)
        self._base = layer_idx * scheduler.max_experts
        self._needed = [self._base + expert_idx for expert_idx in ids]
        self._granted: list[int] = []  # pinned, not yet released, in order of execution

    @property
    def finished(self) -> bool:
        """Everything needed was granted and released."""
        return not self._needed and not self._granted

    @property
    def holds_grants(self) -> bool:
        """Some expert is granted and not yet released: it will become ready without further grants."""
        return bool(self._granted)

    def admit(self) -> int:
        """Grant (pin, and demand where absent) as many needed experts as there may be pins; returns how many.

        Order of grants, and so of fetching: resident, in flight (most done first), rest. Without `reorder`: ascending
        ids, up to and including the first that is missing, and only when nothing is granted.
        """
        if not self._needed:
            return 0
        granted = self._admit_by_state() if self._scheduler.config.reorder else self._admit_in_id_order()
        self._granted += granted
        for code in granted:
            self._scheduler.demand(self.layer_idx, code)
        return len(granted)

    def _admit_by_state(self) -> list[int]:
        cache = self._cache
        room = cache.num_slots - cache.num_pinned
        needed = self._needed
        if len(needed) > 1:
            state, loads = cache.state, cache.loads
            needed.sort(key=lambda c: 0 if state[c] == RESIDENT else (-loads[c].issued if state[c] == LOADING else 1))
            # Residents sort as 0, absent as 1, loads below 0 by chunks issued: move residents to the front.
            num_loading = sum(1 for c in needed if state[c] == LOADING and loads[c].issued)
            if num_loading:
                loading, rest = needed[:num_loading], needed[num_loading:]
                num_resident = sum(1 for c in rest if state[c] == RESIDENT)
                needed = rest[:num_resident] + loading + rest[num_resident:]
        granted: list[int] = []
        kept: list[int] = []
        for code in needed:
            if cache.pins[code]:
                cache.pin(code)  # another visit pinned it already: no further slot is taken
                granted.append(code)
            elif room > 0:
                cache.pin(code)
                room -= 1
                granted.append(code)
            else:
                kept.append(code)
        self._needed = kept
        return granted

    def _admit_in_id_order(self) -> list[int]:
        if self._granted:
            return []
        cache = self._cache
        self._needed.sort()
        granted: list[int] = []
        for code in self._needed:
            if not cache.pins[code] and cache.num_pinned == cache.num_slots:
                break
            missing = cache.state[code] != RESIDENT
            if missing and granted:
                break
            cache.pin(code)
            granted.append(code)
            if missing:
                break
        del self._needed[: len(granted)]
        return granted

    def ready(self) -> list[int]:
        """Expert ids that are granted and resident now: the next group to run."""
        state, base = self._cache.state, self._base
        return [code - base for code in self._granted if state[code] == RESIDENT]

    def slot(self, expert_idx: int) -> int:
        """The slot of a granted, resident expert."""
        code = self._base + expert_idx
        assert self._cache.pins[code], f"expert {expert_idx} of layer {self.layer_idx} is not pinned"
        return self._cache.slot_of[code]

    def failed(self) -> list[int]:
        """Granted experts whose fetch failed: they will not become ready."""
        failures = self._scheduler.failures
        return [code - self._base for code in self._granted if code in failures] if failures else []

    def release(self, expert_ids: Iterable[int]) -> None:
        """The group has run; its experts may be evicted."""
        for expert_idx in expert_ids:
            code = self._base + expert_idx
            self._granted.remove(code)
            self._scheduler.undemand(code, self._cache)

    def close(self) -> None:
        """Give back every grant, whether it ran or not. Safe to repeat."""
        self._needed = []
        while self._granted:
            self._scheduler.undemand(self._granted.pop(), self._cache)
