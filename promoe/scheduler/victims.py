"""Whom to evict: the pool's residents in order of their eviction score, computed once per layer event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .cache import RESIDENT, ExpertCache

if TYPE_CHECKING:
    from .scheduler import Scheduler

# Candidates taken from the array per look: more than a decode step of one layer evicts.
SHORTLIST = 16


class Victims:
    """Unpinned residents, best victim first."""

    def __init__(self, cache: ExpertCache, layers: tuple[int, ...], scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._shortlist: list[int] = []  # best victim last
        self._scores = np.zeros(0)
        self._fresh = False

    def invalidate(self) -> None:
        """Scores changed: a layer was visited or forecast."""
        self._fresh = False

    def next(self, code: int, level: str) -> int | None:
        """The resident to drop for this absent expert, or None if nothing may be dropped for it.

        A hint evicts no hinted expert; speculation, in addition, only one that is expected to be used later than what
        it brings. Pinned demand takes hinted experts last.
        """
        scheduler, cache = self._scheduler, self._cache
        if not self._fresh:
            self._look()
        for attempt in range(2):
            spared: list[int] = []
            victim = None
            while self._shortlist:
                candidate = self._shortlist.pop()
                if cache.state[candidate] != RESIDENT or cache.pins[candidate]:
                    continue
                if scheduler.is_hinted(candidate):
                    spared.append(candidate)
                    continue
                victim = candidate
                break
            self._shortlist += reversed(spared)
            if victim is not None:
                if level == "speculative" and not self._worth(code, victim):
                    self._shortlist.append(victim)
                    return None
                return victim
            if attempt == 0:
                self._look(skip_hinted=True)
        return self._any_hinted() if level == "pinned" else None

    def _worth(self, code: int, victim: int) -> bool:
        return not self._scheduler.eviction.comparable or bool(self._scores[code] < self._scores[victim])

    def _look(self, skip_hinted: bool = False) -> None:
        self._scores = self._scheduler.eviction.scores(self._scheduler.current_layer).ravel()
        candidates = np.flatnonzero((self._cache.states == RESIDENT) & (self._cache.pin_counts == 0))
        if skip_hinted:
            candidates = np.array([c for c in candidates.tolist() if not self._scheduler.is_hinted(c)], dtype=np.intp)
        scores = self._scores[candidates]
        if len(candidates) > SHORTLIST:
            best = np.argpartition(scores, -SHORTLIST)[-SHORTLIST:]
            candidates, scores = candidates[best], scores[best]
        self._shortlist = candidates[np.argsort(scores, kind="stable")].tolist()
        self._fresh = True

    def _any_hinted(self) -> int | None:
        for code in self._cache.slot_of:
            if not self._cache.pins[code]:
                return code
        return None
