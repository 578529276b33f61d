"""The scheduler: what is fetched next, into which slot, and who makes room.

Every method is one atomic operation of a pure state machine; the caller holds one lock around it. Times do not occur:
a *step* is one layer visit. See docs/structure.md for the life of a token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import eviction
from .accuracy import Accuracy
from .budget import WasteBudget
from .cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache, Load
from .calibration import Calibration
from .config import Cause, NullObserver, Observer, SchedulerConfig
from .keys import ExpertKey
from .ledger import Ledger
from .reuse import MAX_LOG_ODDS, Floats, LearnedReuse, ReusePrior
from .room import HINT, PIN, SPECULATION, Room
from .speculation import Speculation
from .visit import Visit

# Chunks: more than any expert has.
NO_LIMIT = 2**62
# The waste budget reacts to the waste of one expert per layer, or of so many.
LEAST_SPAN_EXPERTS = 16


class Lease(NamedTuple):
    """The right and the order to fetch one chunk of an expert into a slot, or, as one transfer, some that follow each other."""

    key: ExpertKey
    chunk_idx: int
    slot: int
    generation: int
    code: int
    cause: Cause
    num_chunks: int = 1


class Scheduler:
    """Pure state machine over pools of slots.

    Args:
        config: sizes and switches.
        observer: is told what happens.
        reuse: what a reuse prior has learned of this model before; None: this one starts from what holds for any model.
        taught: another scheduler that is shown each visit before this one is: its reuse prior serves both.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        observer: Observer | None = None,
        reuse: LearnedReuse | None = None,
        taught: Scheduler | None = None,
    ) -> None:
        self.config = config
        self.reuse = reuse
        self.observer: Observer = observer or NullObserver()
        self.max_experts = max(config.num_experts)
        self.prefetch_on = config.prefetch
        self.step = 0
        self.current_layer = config.num_layers - 1
        self.failures: set[int] = set()  # pinned experts whose fetch failed, until their pins are gone
        num_codes = config.num_layers * self.max_experts
        self._keys = [ExpertKey(*divmod(code, self.max_experts)) for code in range(num_codes)]
        self._num_chunks = [len(chunks) for chunks in config.chunk_bytes]
        self._prior_learns = taught is None and (config.eviction == "next_use" or config.prefetch)
        if taught is None:
            self._prior = ReusePrior(config.num_layers, self.max_experts, learned=reuse)
        else:
            assert not config.hints, "what was announced to one would be known to the other"
            self._prior = taught._prior
        self._num_next = 1  # tokens that the next visits are expected to have
        self.eviction = eviction.create(config.eviction, config.num_layers, self.max_experts, self._prior)
        self.calibration = Calibration(config.num_experts)
        self._accuracy = Accuracy(self.observer)
        self._chosen: list[Sequence[int]] = [()] * config.num_layers  # by each layer's latest hint or visit
        self._demand: deque[int] = deque()  # pinned experts with chunks to send, in order of execution
        self._hinted: dict[int, set[int]] = {}  # layer -> codes that its gate announced
        self._hint_queue: deque[int] = deque()  # those of them with chunks to send
        self._speculation = Speculation()
        self._failed_speculation: set[int] = set()  # not tried again before it is demanded
        self._warm: deque[int] = deque()  # to be put into slots that nobody has, when nothing else is to be sent
        self._warm_sent: set[int] = set()  # of these, whose chunks have all been sent lately
        span_bytes = max(LEAST_SPAN_EXPERTS, config.num_layers) * max(config.expert_bytes)
        self._budget = WasteBudget(config.min_probability, config.waste_share, span_bytes)
        self._ledger = Ledger(self.observer, self._budget)
        self._caches = [ExpertCache(pool.num_slots, num_codes) for pool in config.pools]
        self._rooms = [
            Room(cache, self.max_experts, self.eviction, self._hinted, self._speculation, self._ledger)
            for cache in self._caches
        ]
        pool_of = {layer: idx for idx, pool in enumerate(config.pools) for layer in pool.layers}
        self._cache_of = [self._caches[pool_of[layer]] for layer in range(config.num_layers)]
        self._room_of = [self._rooms[pool_of[layer]] for layer in range(config.num_layers)]
        self._asked_rooms: set[Room] = set()  # for a slot, since the latest layer event
        self._num_experts = sum(config.num_experts)
        self._fits = sum(pool.num_slots for pool in config.pools) >= self._num_experts

    # -- questions ----------------------------------------------------------------------------------------------

    def cache_of(self, layer_idx: int) -> ExpertCache:
        """The pool that holds a layer's experts."""
        return self._cache_of[layer_idx]

    def is_resident(self, layer_idx: int, expert_idx: int) -> bool:
        """Whether an expert is complete in a slot."""
        return self.cache_of(layer_idx).state[layer_idx * self.max_experts + expert_idx] == RESIDENT

    def resident(self) -> list[ExpertKey]:
        """Every expert that is complete in a slot."""
        return sorted(self._keys[code] for cache in self._caches for code in cache.slot_of)

    @property
    def has_orders(self) -> bool:
        """Whether `next_chunks` may have something: False is certain."""
        return bool(self._demand or self._hint_queue or self._speculation or self._warm)

    @property
    def everything_resident(self) -> bool:
        """Whether every expert is in a slot: then there are as many slots, and none will ever be evicted."""
        return self._fits and sum(len(cache.slot_of) for cache in self._caches) == self._num_experts

    # -- what is needed -----------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """The gate chose these experts: early demand. Returns how many are resident.

        Fetches what is missing behind pinned demand, and drops the layer's useless speculation. Pins nothing; may be
        repeated, wrong, or never followed by a visit.
        """
        state = self._cache_of[layer_idx].state
        base = layer_idx * self.max_experts
        codes = [base + expert_idx for expert_idx in ids]
        missing = [code for code in codes if state[code] != RESIDENT]
        if self.config.hints:
            self._forget_hint(layer_idx)
            self._hinted[layer_idx] = set(codes)
            self._hint_queue.extend(missing)
            self._speculation.drop(layer_idx)
            self.current_layer = layer_idx
            self._chosen[layer_idx] = ids
            self._prior.announce(layer_idx, ids)
            self.eviction.announced(layer_idx)
            self._invalidate()
        return len(codes) - len(missing)

    def _forget_hint(self, layer_idx: int) -> bool:
        hinted = self._hinted.pop(layer_idx, None)
        if hinted and self._hint_queue:
            self._hint_queue = deque(code for code in self._hint_queue if code not in hinted)
        return hinted is not None

    def begin_visit(
        self,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        num_sequences: int = 1,
    ) -> Visit:
        """A layer's forward starts and needs exactly these (distinct) experts.

        Args:
            layer_idx: the MoE layer.
            ids: experts that its tokens use.
            tokens: the experts of each real token `[num_tokens][top_k]`, oldest first, for the reuse prior; None if
                the visit has one token.
            num_sequences: tokens that the layer's next visit is expected to have (sequences being decoded).
        """
        self.step += 1
        self.current_layer = layer_idx
        self._chosen[layer_idx] = ids
        tokens = [ids] if tokens is None else tokens
        # A prompt in place of the expected decode step says nothing about the forecasts' worth.
        outcome = ids if len(tokens) <= self._num_next else None
        self._accuracy.visited(layer_idx, outcome)
        if self.config.calibrate:
            self.calibration.observe(layer_idx, outcome)
        self._num_next = num_sequences
        if tokens and self._prior_learns and not self.everything_resident:
            self._prior.observe(layer_idx, tokens)
        self.eviction.visited(layer_idx, ids, tokens, num_sequences)
        self._speculation.drop(layer_idx)
        if not self._forget_hint(layer_idx):
            self._invalidate()  # else the hint was the layer event: one ordering of victims serves both
        return Visit(self, layer_idx, ids)

    def _invalidate(self) -> None:
        for room in self._asked_rooms:
            room.invalidate()
        self._asked_rooms.clear()

    def demand(self, layer_idx: int, codes: Sequence[int]) -> None:
        """A visit pinned these experts: queue what is missing of them (called by `Visit.admit`)."""
        cache = self._cache_of[layer_idx]
        state, pins, ledger = cache.state, cache.pins, self._ledger
        if ledger.has_unasked:
            for code in codes:
                ledger.asked(layer_idx, code)
        for code in codes:
            # Who pinned it before has queued it before.
            if state[code] != RESIDENT and pins[code] == 1:
                self._failed_speculation.discard(code)
                if state[code] != LOADING or not cache.loads[code].all_issued:
                    self._demand.append(code)

    def undemand(self, codes: Sequence[int], cache: ExpertCache) -> None:
        """A visit gives its pins back (called by `Visit`)."""
        for code in codes:
            cache.unpin(code)
            if cache.state[code] != RESIDENT and not cache.pins[code]:
                self.failures.discard(code)
                self._cancel(code)

    def _cancel(self, code: int) -> None:
        if code in self._demand:
            self._demand.remove(code)

    def forecast(self, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> None:
        """A predictor expects a layer's next visit, `steps_ahead` steps from now, to use these experts.

        Creates, re-orders or withdraws speculation; what was fetched of a withdrawn expert stays until its slot is
        wanted. A forecast that comes when its layer's turn has passed is dropped.

        Args:
            steps_ahead: layer visits from the current one; may cross the end of the pass.
            layer_idx: the layer forecast.
            probabilities: `[num_experts]` of use by that visit.
        """
        num_layers = self.config.num_layers
        assert 0 <= layer_idx < num_layers, f"a forecast of layer {layer_idx}, {num_layers} layers"
        if not 0 < steps_ahead <= num_layers or layer_idx in self._hinted:
            return
        num_experts = self.config.num_experts[layer_idx]
        # A predictor's nan is no forecast; it must not enter the fit, which would never forget it.
        p_next = np.asarray(probabilities, dtype=np.float64)
        assert p_next.shape == (num_experts,), f"layer {layer_idx}: {p_next.shape} probabilities, {num_experts} experts"
        if math.isnan(p_next.dot(p_next)):  # one operation; a forward waits for this
            p_next = np.where(np.isnan(p_next), 0.0, p_next)
        self._accuracy.forecast(layer_idx, steps_ahead, p_next)
        if self.config.calibrate:
            prior = self._prior.probability(layer_idx, self._num_next)[:num_experts]
            chosen = self._chosen[(layer_idx - steps_ahead) % num_layers]
            p_next = self.calibration.calibrate(layer_idx, steps_ahead, p_next, prior, chosen)
        self._expect(steps_ahead, layer_idx, p_next, wanted=self.prefetch_on)

    def foresee_reuse(self, layer_idx: int, log_odds: npt.ArrayLike, begun: bool) -> None:
        """A predictor says which experts a layer's next visits will use: eviction goes by it. Fetches nothing.

        Args:
            layer_idx: the layer that it was made from, and is about.
            log_odds: of use within the next visits `[num_experts]`, see `ReusePrior.foresee`.
            begun: whether the visit that it was made from has begun.
        """
        num_experts = self.config.num_experts[layer_idx]
        odds = np.asarray(log_odds, dtype=np.float32)
        assert odds.shape == (num_experts,), f"layer {layer_idx}: {odds.shape} log odds, {num_experts} experts"
        if not np.isfinite(odds).all():
            return  # what is no number must not enter the prior, which would never forget it
        if self._prior.foresee(layer_idx, np.minimum(np.maximum(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS), begun):
            self.eviction.announced(layer_idx)
            self._invalidate()

    def score_forecasts(self) -> None:
        """Tell the observer what all forecasts were worth whose visit has come; it is told of many at once."""
        self._accuracy.score()

    def stream(self, steps_ahead: int, layer_idx: int) -> None:
        """A long prompt will use nearly all experts of a layer: want its absent ones in order of id.

        Needs no predictor, and so no judgement of its worth: it does not matter whether prefetch is on.
        """
        if layer_idx not in self._hinted:
            self._expect(steps_ahead, layer_idx, np.ones(self.config.num_experts[layer_idx]), wanted=True)

    def _expect(self, steps_ahead: int, layer_idx: int, p_next: Floats, wanted: bool) -> None:
        self.eviction.forecast(layer_idx, p_next)
        self._invalidate()
        if wanted:
            self._speculation.replace(layer_idx, self.step + steps_ahead, self._worth_sending(layer_idx, p_next))

    def _worth_sending(self, layer_idx: int, p_next: Floats) -> list[tuple[int, float]]:
        state = self._cache_of[layer_idx].state
        base = layer_idx * self.max_experts
        threshold = self._budget.threshold
        wishes = [(base + expert_idx, p) for expert_idx, p in enumerate(p_next.tolist()) if p >= threshold]
        return [(c, p) for c, p in wishes if state[c] != RESIDENT and c not in self._failed_speculation]

    def withdraw_forecasts(self) -> None:
        """Forget all speculation, for example when prefetch is switched off."""
        for layer_idx in range(self.config.num_layers):
            self._speculation.drop(layer_idx)
            self.eviction.forecast(layer_idx, None)
        self._invalidate()

    # -- what is fetched ----------------------------------------------------------------------------------------

    def next_chunks(self, count: int = 1, speculate: bool = True) -> list[Lease]:
        """Up to `count` chunks to fetch now: pinned demand, then hints, then, if wanted, speculation by deadline, and last what
        `warm` was asked for."""
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
        """All that is demanded and has a slot, pinned or by a hint: each expert as one transfer, reported done once."""
        leases: list[Lease] = []
        while (lease := self._next_demand(whole=True) or self._next_hint(NO_LIMIT)) is not None:
            leases.append(lease)
        return leases

    def next_transfer(self, count: int) -> Lease | None:
        """The next chunk, and with it those of its expert that are certain to follow, if up to `count` are sent now.

        That is all that is left of the pinned expert first in line, also later, for then nothing comes between. For a
        driver that lets no visit end early and knows when each chunk will be there. It reports the lease done once, when
        the last chunk is.
        """
        return self._next_demand(whole=True) or self._next_hint(count) or self._next_speculation() or self._next_warm()

    def _next_demand(self, whole: bool = False) -> Lease | None:
        queue = self._demand
        for position, code in enumerate(queue):
            cache = self._cache_of[code // self.max_experts]
            # Where there is no slot yet, one is on its way; the next in line may already have its own.
            if cache.state[code] == LOADING or self._has_slot(cache, code, PIN):
                # Behind one that still waits for its slot, the rest is not certain: that one goes first once it has it.
                lease = self._issue(cache, code, "demand", NO_LIMIT if whole and position == 0 else 1)
                if lease.chunk_idx + lease.num_chunks == self._num_chunks[lease.key.layer_idx]:
                    del queue[position]
                return lease
        return None

    def _next_hint(self, count: int = 1) -> Lease | None:
        queue = self._hint_queue
        while queue:
            code = queue[0]
            cache = self._cache_of[code // self.max_experts]
            if not self._gave_up(code) and self._has_slot(cache, code, HINT):
                return self._issue(cache, code, "demand", count)
            queue.popleft()  # nothing left to send, or no room: the visit will ask again, with pins
        return None

    def _next_speculation(self) -> Lease | None:
        while (code := self._speculation.most_urgent()) is not None:
            cache = self._cache_of[code // self.max_experts]
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
            cache = self._cache_of[code // self.max_experts]
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

    def _gave_up(self, code: int) -> bool:
        """Whether its fetch failed and no visit has asked anew: a failure is reported, never retried behind its back."""
        return code in self._failed_speculation or code in self.failures

    def _may_speculate(self, cache: ExpertCache, code: int) -> bool:
        """Speculation never takes the last slot that demand could have at once."""
        load = cache.loads.get(code)
        return (load is not None and load.in_flight > 0) or self._room_of[code // self.max_experts].spare_slots() > 1

    def _has_slot(self, cache: ExpertCache, code: int, level: int) -> bool:
        """Whether a chunk of the expert can be sent now, once room is made for it where its level may."""
        state = cache.state[code]
        if state == LOADING:
            load = cache.loads[code]
            return load.issued < load.num_chunks
        if state != ABSENT:
            return False
        room = self._room_of[code // self.max_experts]
        self._asked_rooms.add(room)
        return room.make(code, level, self.current_layer)

    def _issue(self, cache: ExpertCache, code: int, cause: Cause, count: int = 1) -> Lease:
        """At most so many of the expert's chunks."""
        layer_idx = code // self.max_experts
        if cache.state[code] == ABSENT:
            load = cache.start_load(code, self._num_chunks[layer_idx])
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
        """A lease's bytes are in its slot. Returns whether this made the expert resident."""
        load = self._take_back(lease)
        if load is None:
            return False
        code, layer_idx = lease.code, lease.key.layer_idx
        cache = self._cache_of[layer_idx]
        chunk_bytes = self.config.chunk_bytes[layer_idx]
        nbytes = chunk_bytes[lease.chunk_idx]
        if lease.num_chunks > 1:
            nbytes = sum(chunk_bytes[lease.chunk_idx : lease.chunk_idx + lease.num_chunks])
        if cache.state[code] == DRAINING:
            self._ledger.arrived_late(layer_idx, lease.cause, nbytes)
            cache.settle(code)
            return False
        load.done_bytes += nbytes
        self._ledger.arrived(layer_idx, code, lease.cause, nbytes, cache.pins[code] > 0)
        if load.pending or load.issued < load.num_chunks:
            return False
        cache.finish_load(code)
        return True

    def chunk_failed(self, lease: Lease) -> None:
        """A chunk could not be fetched: its expert goes, and whoever pinned it is told through `Visit.failed`."""
        load = self._take_back(lease)
        if load is None:
            return
        code, layer_idx = lease.code, lease.key.layer_idx
        cache = self._cache_of[layer_idx]
        self.observer.failed(lease.cause)
        if cache.state[code] == DRAINING:
            # The load was given up before; whoever pinned the expert since waits for the next one.
            cache.settle(code)
            return
        if cache.pins[code]:
            self.failures.add(code)
            self._cancel(code)
        else:
            self._failed_speculation.add(code)
        self._ledger.dropped(layer_idx, code)
        cache.abandon_load(code)

    def _take_back(self, lease: Lease) -> Load | None:
        load = self._cache_of[lease.key.layer_idx].loads.get(lease.code)
        if load is None or load.generation != lease.generation or load.slot != lease.slot:
            load = None
        elif lease.chunk_idx in load.pending:
            load.pending.remove(lease.chunk_idx)
            return load
        assert not self.config.strict, f"outdated lease {lease}; now {load}"
        self.observer.stale_completion()
        return None

    # -- other --------------------------------------------------------------------------------------------------

    def warm(self, keys: Iterable[ExpertKey]) -> None:
        """Put these experts, best first, into slots that are free by the time nothing else is to be sent; evicts nothing.

        What was asked for before and is not there yet is forgotten.
        """
        self._warm = deque(layer_idx * self.max_experts + expert_idx for layer_idx, expert_idx in keys)

    @property
    def warming(self) -> bool:
        """Whether something that `warm` was asked for may still be sent, or is on its way."""
        return bool(self._warm) or any(map(self._is_arriving, self._warm_sent))

    def _is_arriving(self, code: int) -> bool:
        load = self._cache_of[code // self.max_experts].loads.get(code)
        return load is not None and load.in_flight > 0

    @property
    def is_still(self) -> bool:
        """Whether nothing is in flight."""
        return not any(load.in_flight for cache in self._caches for load in cache.loads.values())

    @property
    def is_used(self) -> bool:
        """Whether a visit has pinned something."""
        return any(cache.num_pinned for cache in self._caches)

    def prepare_resize(self, pool_idx: int, num_slots: int) -> dict[int, int]:
        """Evict what another number of slots has no room for; to be called while it `is_still` and not `is_used`.

        Returns:
            For each slot with an expert, the slot that its bytes have to be in then.
        """
        for layer_idx in list(self._hinted):
            self._forget_hint(layer_idx)
        self.withdraw_forecasts()
        self._rooms[pool_idx].shrink_to(num_slots, self.current_layer)
        return self._caches[pool_idx].kept_slots(num_slots)

    def resize(self, pool_idx: int, num_slots: int, kept: Mapping[int, int]) -> None:
        """Have another number of slots in a pool, as prepared."""
        self._caches[pool_idx].resize(num_slots, kept)
        self._fits = sum(cache.num_slots for cache in self._caches) >= self._num_experts
        self._rooms[pool_idx].invalidate()

    def start_from(self, rates: Sequence[Sequence[float]]) -> None:
        """How often experts were used before: what eviction goes by until it has seen for itself.

        Args:
            rates: uses per token of each layer's experts, `[num_layers][num_experts]`.
        """
        for layer_idx, of_layer in enumerate(rates):
            if self._prior.start_from(layer_idx, of_layer):
                self.eviction.announced(layer_idx)
        self.eviction.popular(rates)
        self._invalidate()

    def check_integrity(self) -> None:
        """Every conservation law of the state machine; raises AssertionError with the numbers."""
        queued = set(self._demand)
        assert len(queued) == len(self._demand), f"queued twice: {self._demand}"
        for cache in self._caches:
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
            assert self._cache_of[code // self.max_experts].pins[code], f"failure of unpinned {self._keys[code]}"
        assert all(code // self.max_experts in self._hinted for code in self._hint_queue), self._hint_queue
