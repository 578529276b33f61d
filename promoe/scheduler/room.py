"""Who makes room for an absent expert: a paused transfer, or the resident that is needed last."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache
from .eviction import Eviction
from .ledger import Ledger
from .speculation import Speculation

# What stands behind a request for a slot, or behind an expert that has one; the higher may displace the lower.
NOBODY, SPECULATION, HINT, PIN = range(4)


class Room:
    """Empties slots of one pool. Scores of residents are computed at most once per layer event, as arrays.

    Args:
        cache: the pool.
        max_experts: codes per layer.
        eviction: scores residents.
        hinted: codes announced by gates, per layer; the scheduler's own, read here.
        speculation: the scheduler's own, read here.
        ledger: is told what was dropped.
    """

    def __init__(
        self,
        cache: ExpertCache,
        max_experts: int,
        eviction: Eviction,
        hinted: Mapping[int, set[int]],
        speculation: Speculation,
        ledger: Ledger,
    ) -> None:
        self._cache = cache
        self._max_experts = max_experts
        self._eviction = eviction
        self._hinted = hinted
        self._speculation = speculation
        self._ledger = ledger
        self._scores = np.zeros(0)
        self._expendable = np.zeros(0)  # scores of those that may go, as of the last look; the others -inf
        self._fresh = False

    def invalidate(self) -> None:
        """Scores changed: a layer was visited or forecast."""
        self._fresh = False

    def make(self, code: int, level: int, current_layer: int) -> bool:
        """Have a free slot for an absent expert, if its level may take one.

        A paused transfer that nobody wants goes first. A hint evicts no hinted expert; speculation, in addition, only
        one that is expected to be used later than what it brings. Pins get everything that is not pinned.
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
        """Drop all paused transfers, and the residents that are needed last, until so few are left. Nothing is pinned."""
        while self._drop_paused(PIN):
            pass
        self._look(current_layer)
        while len(self._cache.slot_of) > num_residents:
            victim = self._most_expendable()
            assert victim is not None, "some resident is pinned or hinted"
            self._evict(victim)

    def spare_slots(self) -> int:
        """Slots that demand could have at once: neither pinned nor with a chunk on its way."""
        cache = self._cache
        busy = sum(1 for code, load in cache.loads.items() if load.pending and not cache.pins[code])
        return cache.num_slots - cache.num_pinned - busy

    def _is_hinted(self, code: int) -> bool:
        return bool(self._hinted) and code in self._hinted.get(code // self._max_experts, ())

    def _claim(self, code: int) -> int:
        if self._is_hinted(code):
            return HINT
        return SPECULATION if self._speculation.wants(code // self._max_experts, code) else NOBODY

    def _drop_paused(self, highest_claim: int) -> bool:
        """Drop the unpinned load with nothing in flight whose claim is lowest, if it is at most this one."""
        cache = self._cache
        paused = [
            (self._claim(code), load.done_bytes, code)
            for code, load in cache.loads.items()
            if not load.pending and not cache.pins[code]
        ]
        if not paused:
            return False
        claim, _, code = min(paused)
        if claim > highest_claim:
            return False
        self._ledger.dropped(code // self._max_experts, code)
        cache.abandon_load(code)
        return True

    def _stop_a_transfer(self) -> None:
        """Stop an unpinned load whose chunks are in flight, unless enough of them are draining for all that wait.

        Slots are at least as many as pins, so while a pinned expert has none and nothing can be dropped at once, some
        slot is on its way to an expert that nobody pinned, and comes free when what is in flight has landed.
        """
        cache = self._cache
        without_slot = (cache.states == ABSENT) | (cache.states == DRAINING)
        waiting = int(np.count_nonzero(without_slot & (cache.pin_counts > 0)))
        draining = sum(1 for c in cache.loads if cache.state[c] == DRAINING)
        moving = [
            (self._claim(code), load.issued, code)
            for code, load in cache.loads.items()
            if cache.state[code] == LOADING and not cache.pins[code]
        ]
        if moving and draining < waiting:
            _, _, code = min(moving)
            self._ledger.dropped(code // self._max_experts, code)
            cache.abandon_load(code)

    def _evict(self, code: int) -> None:
        layer_idx = code // self._max_experts
        self._ledger.dropped(layer_idx, code)
        self._cache.evict(code)
        self._ledger.observer.evicted(layer_idx)

    def _victim(self, code: int, level: int, current_layer: int) -> int | None:
        """The resident with the highest score that is neither pinned nor hinted, if it may go for this expert."""
        # What served the layer event so far may be used up: then look once more.
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
        # On the path of every hint, so in few array operations; `_most_expendable` has the last word on each candidate.
        self._scores = self._eviction.scores(current_layer).ravel()
        self._expendable = np.where(self._cache.states == RESIDENT, self._scores, -np.inf)
        for codes in self._hinted.values():
            self._expendable[list(codes)] = -np.inf
        if self._cache.num_pinned:
            self._expendable[self._cache.pin_counts > 0] = -np.inf
        self._fresh = True
