"""What is fetched next, into which slot, and what arrived: the lower half of the scheduler.

It knows what is wanted, and how urgently: experts that a visit has pinned come first, then those that a gate has hinted
at, then those that a forecast expects, and last those that free slots are to be warmed with. Why they are wanted is up
to the `Scheduler`, which is built on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache, Load
from .config import Cause, ExpertKey, Observer, SchedulerConfig
from .eviction import Eviction
from .slot_reclaim import HINT, PIN, SPECULATION, SlotReclaimer
from .speculation import Speculation
from .waste import FetchedBytes, WasteBudget

# More chunks than any expert has.
NO_LIMIT = 2**62
# The waste budget spans at least the bytes of this many experts; with more layers, of one expert per layer.
LEAST_SPAN_EXPERTS = 16


class Lease(NamedTuple):
    """The order, and the right, to fetch chunks of an expert into a slot: one, or several consecutive ones as one transfer."""

    key: ExpertKey
    chunk_idx: int
    slot: int
    generation: int
    code: int
    cause: Cause
    num_chunks: int = 1


class FetchQueue:
    """The pools of slots, what is on its way into them, and what is still to be sent.

    Args:
        config: sizes and switches.
        observer: counts what happens.
        eviction: scores the residents that may be evicted.

    Attributes:
        caches: the pools, in the order of `config.pools`.
        pool_idx_of: the pool of each expert, by code.
        caches_by_code: the same, as caches.
        first_chunks: see `SchedulerConfig.first_chunks`, by code.
    """

    def __init__(self, config: SchedulerConfig, observer: Observer, eviction: Eviction) -> None:
        self.config = config
        self.observer = observer
        self.eviction = eviction
        self.max_experts = max(config.num_experts)
        self.current_layer = config.num_layers - 1
        self.failures: set[int] = set()  # pinned experts whose fetch failed, until their pins are gone
        num_codes = config.num_layers * self.max_experts
        self._keys = [ExpertKey(*divmod(code, self.max_experts)) for code in range(num_codes)]
        self._chunk_bytes = [config.chunk_bytes_of(key) for key in self._keys]
        self.first_chunks = [config.first_chunks_of(key) for key in self._keys]
        self._demand: deque[int] = deque()  # pinned experts with chunks to send, in order of execution
        self._hinted: dict[int, set[int]] = {}  # layer -> codes that its gate announced
        self._hint_queue: deque[int] = deque()  # those of them with chunks to send
        self._speculation = Speculation()
        self._failed_speculation: set[int] = set()  # not tried again before it is demanded
        self._warm: deque[int] = deque()  # to be put into free slots when nothing else is to be sent
        self._warm_sent: set[int] = set()  # of these, experts whose chunks were all sent lately
        span_bytes = max(LEAST_SPAN_EXPERTS, config.num_layers) * max(config.expert_bytes)
        self._budget = WasteBudget(config.min_probability, config.waste_share, span_bytes)
        self._fetched = FetchedBytes(observer, self._budget)
        self.caches = [ExpertCache(pool.num_slots, num_codes) for pool in config.pools]
        self._reclaimers = [
            SlotReclaimer(cache, self.max_experts, eviction, self._hinted, self._speculation, self._fetched)
            for cache in self.caches
        ]
        self.pool_idx_of = _pools_by_code(config, self._keys)
        self.caches_by_code = [self.caches[idx] for idx in self.pool_idx_of]
        self._reclaimer_of = [self._reclaimers[idx] for idx in self.pool_idx_of]
        self._asked_reclaimers: set[SlotReclaimer] = set()  # for a slot, since the latest layer event

    # -- questions ----------------------------------------------------------------------------------------------

    def is_resident(self, layer_idx: int, expert_idx: int) -> bool:
        """Return whether an expert is complete in a slot."""
        code = layer_idx * self.max_experts + expert_idx
        return self.caches_by_code[code].state[code] == RESIDENT

    def resident(self) -> list[ExpertKey]:
        """Return all experts that are complete in a slot, in order."""
        return sorted(self._keys[code] for cache in self.caches for code in cache.slot_of)

    @property
    def has_orders(self) -> bool:
        """Whether `next_chunks` may return something. If False, it certainly returns nothing."""
        return bool(self._demand or self._hint_queue or self._speculation or self._warm)

    @property
    def warming(self) -> bool:
        """Whether something that `warm` was asked for may still be sent, or is on its way."""
        return bool(self._warm) or any(map(self._is_arriving, self._warm_sent))

    @property
    def is_still(self) -> bool:
        """Whether nothing is in flight."""
        return not any(load.in_flight for cache in self.caches for load in cache.loads.values())

    @property
    def is_used(self) -> bool:
        """Whether a visit has pinned something."""
        return any(cache.num_pinned for cache in self.caches)

    # -- what is wanted -----------------------------------------------------------------------------------------

    def demand(self, layer_idx: int, codes: Sequence[int]) -> None:
        """Queue what is missing of experts that a visit has just pinned (called by `Visit.admit`)."""
        caches, fetched = self.caches_by_code, self._fetched
        if fetched.has_unasked:
            for code in codes:
                fetched.asked(layer_idx, code)
        for code in codes:
            cache = caches[code]
            state = cache.state[code]
            # With more than one pin, it is in the queue already.
            if state != RESIDENT and cache.pins[code] == 1:
                self._failed_speculation.discard(code)
                if state != LOADING or not cache.loads[code].all_issued:
                    self._demand.append(code)

    def undemand(self, codes: Sequence[int]) -> None:
        """Return a visit's pins (called by `Visit`)."""
        caches = self.caches_by_code
        for code in codes:
            cache = caches[code]
            cache.unpin(code)
            if cache.state[code] != RESIDENT and not cache.pins[code]:
                self.failures.discard(code)
                self._cancel(code)

    def warm(self, keys: Iterable[ExpertKey]) -> None:
        """Put these experts, best first, into slots that are free when nothing else is to be sent. Evicts nothing.

        Replaces what an earlier call asked for and is not there yet.
        """
        self._warm = deque(layer_idx * self.max_experts + expert_idx for layer_idx, expert_idx in keys)

    def _cancel(self, code: int) -> None:
        if code in self._demand:
            self._demand.remove(code)

    def _forget_hint(self, layer_idx: int) -> bool:
        hinted = self._hinted.pop(layer_idx, None)
        if hinted and self._hint_queue:
            self._hint_queue = deque(code for code in self._hint_queue if code not in hinted)
        return hinted is not None

    def _invalidate(self) -> None:
        """Make scores of residents be computed again before the next one is evicted."""
        for reclaimer in self._asked_reclaimers:
            reclaimer.invalidate()
        self._asked_reclaimers.clear()

    # -- what is sent -------------------------------------------------------------------------------------------

    def next_chunks(self, count: int = 1, speculate: bool = True) -> list[Lease]:
        """Return up to `count` chunks to fetch now, most urgent first.

        Pinned experts come first, then hints, then, if `speculate`, forecasts by deadline, and last what `warm` was
        asked for.
        """
        leases: list[Lease] = []
        while len(leases) < count:
            lease = self._next_demand() or self._next_hint()
            if lease is None and speculate:
                lease = self._next_speculation() or self._next_warm()
            if lease is None:
                break
            leases.append(lease)
        return leases

    def next_demand(self) -> list[Lease]:
        """Return all that is demanded (pinned or hinted) and has a slot.

        Each expert is one transfer; report its lease done once.
        """
        leases: list[Lease] = []
        while (lease := self._next_demand(whole=True) or self._next_hint(NO_LIMIT)) is not None:
            leases.append(lease)
        return leases

    def next_transfer(self, count: int) -> Lease | None:
        """Return the next chunk together with those that certainly follow it, if up to `count` are sent now.

        For the first pinned expert in the queue, that is all that is left of it: nothing can come between. This is for a
        driver that lets no visit end early and knows when each chunk will arrive. It reports the lease done once, when
        the last chunk has arrived.
        """
        return self._next_demand(whole=True) or self._next_hint(count) or self._next_speculation() or self._next_warm()

    def _next_demand(self, whole: bool = False) -> Lease | None:
        queue = self._demand
        for position, code in enumerate(queue):
            cache = self.caches_by_code[code]
            # An expert without a slot waits for one that is on its way; the next in the queue may already have its own.
            if cache.state[code] == LOADING or self._has_slot(cache, code, PIN):
                # Behind an expert that waits for its slot, only one chunk is certain: that expert goes first once it has it.
                lease = self._issue(cache, code, "demand", NO_LIMIT if whole and position == 0 else 1)
                if lease.chunk_idx + lease.num_chunks == len(self._chunk_bytes[lease.code]):
                    del queue[position]
                return lease
        return None

    def _next_hint(self, count: int = 1) -> Lease | None:
        queue = self._hint_queue
        while queue:
            code = queue[0]
            cache = self.caches_by_code[code]
            if not self._gave_up(code) and self._has_slot(cache, code, HINT):
                return self._issue(cache, code, "demand", count)
            queue.popleft()  # nothing left to send, or no slot: the visit will ask again, with pins
        return None

    def _next_speculation(self) -> Lease | None:
        while (code := self._speculation.most_urgent()) is not None:
            cache = self.caches_by_code[code]
            if (
                not self._gave_up(code)
                and self._may_speculate(cache, code)
                and self._has_slot(cache, code, SPECULATION)
            ):
                return self._issue(cache, code, "prefetch")
            self._speculation.skip()
        return None

    def _next_warm(self) -> Lease | None:
        while self._warm:
            code = self._warm[0]
            cache = self.caches_by_code[code]
            has_slot = cache.state[code] == LOADING and not cache.loads[code].all_issued
            # An expert that a visit has pinned is left to that visit: it is queued, or has failed for good.
            wanted = not cache.pins[code] and not self._gave_up(code)
            if wanted and (has_slot or (cache.state[code] == ABSENT and cache.num_free)):
                lease = self._issue(cache, code, "demand")
                if cache.loads[code].all_issued:
                    self._warm.popleft()
                    self._warm_sent = {sent for sent in (*self._warm_sent, code) if self._is_arriving(sent)}
                return lease
            self._warm.popleft()
        return None

    def _is_arriving(self, code: int) -> bool:
        load = self.caches_by_code[code].loads.get(code)
        return load is not None and load.in_flight > 0

    def _gave_up(self, code: int) -> bool:
        """Return whether the expert's fetch failed and no visit has asked again. A failure is not retried unasked."""
        return code in self._failed_speculation or code in self.failures

    def _may_speculate(self, cache: ExpertCache, code: int) -> bool:
        """Return whether a slot is left for demand. Speculation never takes the last one that demand could have at once."""
        load = cache.loads.get(code)
        in_flight = load is not None and load.in_flight > 0
        return in_flight or self._reclaimer_of[code].spare_slots() > 1

    def _has_slot(self, cache: ExpertCache, code: int, level: int) -> bool:
        """Return whether a chunk of the expert can be sent now. Frees a slot for it where its level may."""
        state = cache.state[code]
        if state == LOADING:
            load = cache.loads[code]
            return load.issued < load.num_chunks
        if state != ABSENT:
            return False
        reclaimer = self._reclaimer_of[code]
        self._asked_reclaimers.add(reclaimer)
        return reclaimer.free_a_slot(code, level, self.current_layer)

    def _issue(self, cache: ExpertCache, code: int, cause: Cause, count: int = 1) -> Lease:
        """Return a lease for at most `count` of the expert's chunks."""
        layer_idx = code // self.max_experts
        if cache.state[code] == ABSENT:
            load = cache.start_load(code, len(self._chunk_bytes[code]))
            self.eviction.loading(layer_idx, code - layer_idx * self.max_experts)
        else:
            load = cache.loads[code]
        chunk_idx = load.issued
        load.pending.add(chunk_idx)
        num_chunks = 1 if count == 1 else min(count, load.num_chunks - chunk_idx)
        load.issued += num_chunks
        return Lease(self._keys[code], chunk_idx, load.slot, load.generation, code, cause, num_chunks)

    # -- what arrived -------------------------------------------------------------------------------------------

    def chunk_done(self, lease: Lease) -> bool:
        """Record that a lease's bytes are in its slot. Returns whether this made the expert resident."""
        load = self._take_back(lease)
        if load is None:
            return False
        code, layer_idx = lease.code, lease.key.layer_idx
        cache = self.caches_by_code[code]
        chunk_bytes = self._chunk_bytes[code]
        nbytes = chunk_bytes[lease.chunk_idx]
        if lease.num_chunks > 1:
            nbytes = sum(chunk_bytes[lease.chunk_idx : lease.chunk_idx + lease.num_chunks])
        if cache.state[code] == DRAINING:
            self._fetched.arrived_late(layer_idx, lease.cause, nbytes)
            cache.settle(code)
            return False
        load.done_bytes += nbytes
        self._fetched.arrived(layer_idx, code, lease.cause, nbytes, cache.pins[code] > 0)
        if load.pending or load.issued < load.num_chunks:
            return False
        cache.finish_load(code)
        return True

    def chunk_failed(self, lease: Lease) -> None:
        """Record that a chunk could not be fetched. Its expert is dropped; visits see it in `Visit.failed`."""
        load = self._take_back(lease)
        if load is None:
            return
        code, layer_idx = lease.code, lease.key.layer_idx
        cache = self.caches_by_code[code]
        self.observer.failed(lease.cause)
        if cache.state[code] == DRAINING:
            # The load was given up before. A visit that has pinned the expert since waits for the next one.
            cache.settle(code)
            return
        if cache.pins[code]:
            self.failures.add(code)
            self._cancel(code)
        else:
            self._failed_speculation.add(code)
        self._fetched.dropped(layer_idx, code)
        cache.abandon_load(code)

    def _take_back(self, lease: Lease) -> Load | None:
        load = self.caches_by_code[lease.code].loads.get(lease.code)
        if load is None or load.generation != lease.generation or load.slot != lease.slot:
            load = None
        elif lease.chunk_idx in load.pending:
            load.pending.remove(lease.chunk_idx)
            return load
        assert not self.config.strict, f"outdated lease {lease}; now {load}"
        self.observer.stale_completion()
        return None

    def check_integrity(self) -> None:
        """Check every conservation law of the state machine; raise AssertionError with the numbers."""
        queued = set(self._demand)
        assert len(queued) == len(self._demand), f"queued twice: {self._demand}"
        for cache in self.caches:
            cache.check_integrity()
            pinned = np.flatnonzero(cache.pin_counts).tolist()
            for code in pinned:
                load = cache.loads.get(code)
                coming = code in queued or (load is not None and cache.state[code] == LOADING and load.all_issued)
                fates = (cache.state[code] == RESIDENT, code in self.failures, coming)
                assert sum(fates) == 1, f"{self._keys[code]} is pinned; resident, failed, coming = {fates}; {load}"
            queued.difference_update(pinned)
        assert not queued, f"queued as demand but not pinned: {[self._keys[code] for code in queued]}"
        for code in self.failures:
            assert self.caches_by_code[code].pins[code], f"failure of unpinned {self._keys[code]}"
        assert all(code // self.max_experts in self._hinted for code in self._hint_queue), self._hint_queue


def _pools_by_code(config: SchedulerConfig, keys: Sequence[ExpertKey]) -> list[int]:
    """Return the pool of each expert, and of codes that no expert has, by code."""
    ordinary, hot = (
        {layer: idx for idx, pool in enumerate(config.pools) if pool.hot == kind for layer in pool.layers}
        for kind in (False, True)
    )
    return [(hot if config.is_hot(key) else ordinary)[key.layer_idx] for key in keys]
