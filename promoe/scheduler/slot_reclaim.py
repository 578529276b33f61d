"""Frees a slot for an absent expert: takes that of a paused transfer, or of the resident that is needed last."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache
from .eviction import Eviction
from .speculation import Speculation
from .waste import FetchedBytes

# Who asks for a slot, or stands behind an expert that has one. A higher level may take the slot of a lower one.
NOBODY, SPECULATION, HINT, PIN = range(4)


class SlotReclaimer:
    """Frees slots of one pool. Scores of residents are computed at most once per layer event, as arrays.

    Args:
        cache: the pool.
        max_experts: codes per layer.
        eviction: scores residents.
        hinted: codes announced by gates, per layer; only read here.
        speculation: experts that forecasts expect; only read here.
        fetched: is told whose bytes were dropped.
    """

    def __init__(
        self,
        cache: ExpertCache,
        max_experts: int,
        eviction: Eviction,
        hinted: Mapping[int, set[int]],
        speculation: Speculation,
        fetched: FetchedBytes,
    ) -> None:
        self._cache = cache
        self._max_experts = max_experts
        self._eviction = eviction
        self._hinted = hinted
        self._speculation = speculation
        self._fetched = fetched
        self._scores = np.zeros(0)
        self._expendable = np.zeros(0)  # scores of those that may go, as of the last look; the others -inf
        self._fresh = False

    def invalidate(self) -> None:
        """Compute scores again before the next eviction, because a layer was visited or forecast."""
        self._fresh = False

    def free_a_slot(self, code: int, level: int, current_layer: int) -> bool:
        """Free a slot for an absent expert, if its level may take one. Returns whether a slot is free.

        A paused transfer that nobody wants goes first. A hint evicts no hinted expert. Speculation, in addition, only
        evicts an expert that is expected to be used later than the one it brings. Pins take every slot that is not
        pinned.
        """
        if self._cache.num_free or self._drop_paused(NOBODY):
            return True
        victim = self._victim(code, level, current_layer)
        if victim is None and level == PIN and not self._drop_paused(HINT):
            victim = next((c for c in self._cache.slot_of if not self._cache.pins[c]), None)
        if victim is not None:
            self._evict(victim)
            return True
        if level == HINT:
            self._drop_paused(SPECULATION)
        elif level == PIN and not self._cache.num_free:
            # Nothing can be dropped at once.
            self._stop_a_transfer()
        return self._cache.num_free > 0

    def shrink_to(self, num_residents: int, current_layer: int) -> None:
        """Drop all paused transfers, and evict until `num_residents` experts are left. Nothing may be pinned."""
        while self._drop_paused(PIN):
            pass
        self._look(current_layer)
        while len(self._cache.slot_of) > num_residents:
            victim = self._most_expendable()
            assert victim is not None, "some resident is pinned or hinted"
            self._evict(victim)

    def spare_slots(self) -> int:
        """Return how many slots demand could have at once: those neither pinned nor with a chunk on its way."""
        cache = self._cache
        busy = sum(1 for code, load in cache.loads.items() if load.pending and not cache.pins[code])
        return cache.num_slots - cache.num_pinned - busy

    def _is_hinted(self, code: int) -> bool:
        return bool(self._hinted) and code in self._hinted.get(code // self._max_experts, ())

    def _level_of(self, code: int) -> int:
        if self._is_hinted(code):
            return HINT
        return SPECULATION if self._speculation.wants(code // self._max_experts, code) else NOBODY

    def _drop_paused(self, highest_level: int) -> bool:
        """Drop the unpinned load of the lowest level that has nothing in flight, if its level is at most this one."""
        cache = self._cache
        paused = [
            (self._level_of(code), load.done_bytes, code)
            for code, load in cache.loads.items()
            if not load.pending and not cache.pins[code]
        ]
        if not paused:
            return False
        level, _, code = min(paused)
        if level > highest_level:
            return False
        self._fetched.dropped(code // self._max_experts, code)
        cache.abandon_load(code)
        return True

    def _stop_a_transfer(self) -> None:
        """Stop an unpinned load whose chunks are in flight, unless enough loads are draining for all that wait.

        There are at least as many slots as pins. So while a pinned expert has no slot and nothing can be dropped at
        once, an unpinned expert is being loaded into some slot. That slot becomes free when what is in flight has
        arrived.
        """
        cache = self._cache
        without_slot = (cache.states == ABSENT) | (cache.states == DRAINING)
        waiting = int(np.count_nonzero(without_slot & (cache.pin_counts > 0)))
        draining = sum(1 for c in cache.loads if cache.state[c] == DRAINING)
        moving = [
            (self._level_of(code), load.issued, code)
            for code, load in cache.loads.items()
            if cache.state[code] == LOADING and not cache.pins[code]
        ]
        if moving and draining < waiting:
            _, _, code = min(moving)
            self._fetched.dropped(code // self._max_experts, code)
            cache.abandon_load(code)

    def _evict(self, code: int) -> None:
        layer_idx = code // self._max_experts
        self._fetched.dropped(layer_idx, code)
        self._cache.evict(code)
        self._fetched.observer.evicted(layer_idx)

    def _victim(self, code: int, level: int, current_layer: int) -> int | None:
        """Return the resident with the highest score that is neither pinned nor hinted, if this expert may replace it."""
        # All candidates of the last look may be used up: then look once more.
        for look in (False, True) if self._fresh else (True,):
            if look:
                self._look(current_layer)
            victim = self._most_expendable()
            if victim is not None:
                if level == SPECULATION and not self._worth(code, victim):
                    return None
                self._expendable[victim] = -np.inf
                return victim
        return None

    def _most_expendable(self) -> int | None:
        cache, expendable = self._cache, self._expendable
        while True:
            code = int(expendable.argmax())
            if expendable[code] == -np.inf:
                return None
            if cache.state[code] == RESIDENT and not cache.pins[code] and not self._is_hinted(code):
                return code
            expendable[code] = -np.inf

    def _worth(self, code: int, victim: int) -> bool:
        return not self._eviction.comparable or bool(self._scores[code] < self._scores[victim])

    def _look(self, current_layer: int) -> None:
        # Every hint waits for this, so it uses few array operations; `_most_expendable` checks each candidate again.
        self._scores = self._eviction.scores(current_layer).ravel()
        self._expendable = np.where(self._cache.states == RESIDENT, self._scores, -np.inf)
        for codes in self._hinted.values():
            self._expendable[list(codes)] = -np.inf
        if self._cache.num_pinned:
            self._expendable[self._cache.pin_counts > 0] = -np.inf
        self._fresh = True
