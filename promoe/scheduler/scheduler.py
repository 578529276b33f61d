"""The scheduler: what is fetched next, into which slot, and who makes room.

Every method is one atomic operation of a pure state machine; the caller holds one lock around it. Times do not occur:
a *step* is one layer visit. See docs/structure.md for the life of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import eviction
from .cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache, Load
from .calibration import Calibration
from .config import Cause, NullObserver, Observer, SchedulerConfig
from .keys import ExpertKey
from .reuse import Floats, ReusePrior
from .speculation import Speculation
from .victims import Victims
from .visit import Visit


class Lease(NamedTuple):
    """The right and the order to fetch one chunk of an expert into a slot."""

    key: ExpertKey
    chunk_idx: int
    slot: int
    generation: int
    code: int
    cause: Cause


class Scheduler:
    """Pure state machine over pools of slots. See `SchedulerConfig` for sizes and switches."""

    def __init__(self, config: SchedulerConfig, observer: Observer | None = None) -> None:
        self.config = config
        self.observer: Observer = observer or NullObserver()
        self.max_experts = max(config.num_experts)
        self.prefetch_on = config.prefetch
        self.step = 0
        self.current_layer = config.num_layers - 1
        self.failures: set[int] = set()  # demanded experts whose fetch failed, until their pins are gone
        num_codes = config.num_layers * self.max_experts
        self._prior = ReusePrior(config.num_layers, self.max_experts)
        self.eviction = eviction.create(config.eviction, config.num_layers, self.max_experts, self._prior)
        self.calibration = Calibration()
        self._caches = [ExpertCache(pool.num_slots, num_codes) for pool in config.pools]
        self._victims = [Victims(cache, pool.layers, self) for cache, pool in zip(self._caches, config.pools, strict=True)]
        self._pool_of = {layer: idx for idx, pool in enumerate(config.pools) for layer in pool.layers}
        self._keys = [ExpertKey(*divmod(code, self.max_experts)) for code in range(num_codes)]
        self._num_chunks = [len(chunks) for chunks in config.chunk_bytes]
        self._demand: deque[int] = deque()  # pinned experts to fetch, in order of execution
        self._hinted: dict[int, set[int]] = {}  # layer -> codes that its gate announced
        self._hint_queue: deque[int] = deque()
        self._speculation = Speculation()
        self._speculative_bytes: dict[int, int] = {}  # code -> bytes fetched ahead and not needed yet
        self._failed_speculation: set[int] = set()  # not tried again before it is demanded

    # -- questions ----------------------------------------------------------------------------------------------

    def cache_of(self, layer_idx: int) -> ExpertCache:
        """The pool that holds a layer's experts."""
        return self._caches[self._pool_of[layer_idx]]

    def is_resident(self, layer_idx: int, expert_idx: int) -> bool:
        """Whether an expert is complete in a slot."""
        return self.cache_of(layer_idx).state[layer_idx * self.max_experts + expert_idx] == RESIDENT

    def resident(self) -> list[ExpertKey]:
        """Every expert that is complete in a slot."""
        return sorted(self._keys[code] for cache in self._caches for code in cache.slot_of)

    def is_hinted(self, code: int) -> bool:
        """Whether the expert's gate announced it and its layer was not visited yet."""
        return code in self._hinted.get(code // self.max_experts, ())

    # -- what is needed -----------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """The gate chose these experts: early demand. Returns how many are resident.

        Fetches what is missing behind pinned demand, and drops the layer's useless speculation. Pins nothing; may be
        repeated, wrong, or never followed by a visit.
        """
        cache = self.cache_of(layer_idx)
        base = layer_idx * self.max_experts
        codes = [base + expert_idx for expert_idx in ids]
        missing = [code for code in codes if cache.state[code] != RESIDENT]
        if self.config.hints:
            self._hinted[layer_idx] = set(codes)
            self._hint_queue.extend(missing)
            self._speculation.drop(layer_idx)
        return len(codes) - len(missing)

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
        tokens = [ids] if tokens is None else tokens
        if tokens:
            self._prior.observe(layer_idx, tokens)
        self.eviction.visited(layer_idx, ids, tokens, num_sequences)
        self._hinted.pop(layer_idx, None)
        self._speculation.drop(layer_idx)
        if self.config.calibrate:
            self.calibration.observe(layer_idx, ids)
        for victims in self._victims:
            victims.invalidate()
        return Visit(self, layer_idx, ids)

    def demand(self, layer_idx: int, code: int) -> None:
        """A visit pinned this expert: queue what is missing of it (called by `Visit.admit`)."""
        fetched_ahead = self._speculative_bytes.pop(code, None)
        if fetched_ahead:
            self.observer.prefetch_used(layer_idx, fetched_ahead)
        cache = self.cache_of(layer_idx)
        if cache.state[code] != RESIDENT:
            self._failed_speculation.discard(code)
            self._demand.append(code)

    def undemand(self, code: int, cache: ExpertCache) -> None:
        """A visit gives its pin back (called by `Visit`)."""
        cache.unpin(code)
        if not cache.pins[code]:
            self.failures.discard(code)

    def forecast(self, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> None:
        """A predictor expects a layer's next visit, `steps_ahead` steps from now, to use these experts.

        Creates, re-orders or withdraws speculation; what was fetched of a withdrawn expert stays until its slot is
        wanted. A forecast that comes when its layer's turn has passed is dropped.

        Args:
            steps_ahead: layer visits from the current one; may cross the end of the pass.
            layer_idx: the layer forecast.
            probabilities: `[num_experts]` of use by that visit.
        """
        if not 0 < steps_ahead <= self.config.num_layers or layer_idx in self._hinted:
            return
        prior = self._prior.probability(layer_idx)
        raw = np.full(self.max_experts, 0.0)
        raw[: self.config.num_experts[layer_idx]] = probabilities
        p_next = self.calibration.calibrate(layer_idx, steps_ahead, raw, prior) if self.config.calibrate else raw
        self.eviction.forecast(layer_idx, p_next)
        for victims in self._victims:
            victims.invalidate()
        if self.prefetch_on:
            self._speculation.replace(layer_idx, self.step + steps_ahead, self._worth_sending(layer_idx, p_next))

    def _worth_sending(self, layer_idx: int, p_next: Floats) -> list[tuple[int, float]]:
        cache = self.cache_of(layer_idx)
        base = layer_idx * self.max_experts
        likely = np.flatnonzero(p_next >= self.config.min_probability)
        wishes = [(base + expert_idx, float(p_next[expert_idx])) for expert_idx in likely.tolist()]
        return [(c, p) for c, p in wishes if cache.state[c] != RESIDENT and c not in self._failed_speculation]

    def withdraw_forecasts(self) -> None:
        """Forget all speculation, for example when prefetch is switched off."""
        for layer_idx in range(self.config.num_layers):
            self._speculation.drop(layer_idx)
            self.eviction.forecast(layer_idx, None)

    # -- what is fetched ----------------------------------------------------------------------------------------

    def next_chunks(self, count: int = 1) -> list[Lease]:
        """Up to `count` chunks to fetch now: pinned demand, then hints, then speculation by deadline."""
        leases: list[Lease] = []
        while len(leases) < count:
            lease = self._next_demand() or self._next_hint() or self._next_speculation()
            if lease is None:
                break
            leases.append(lease)
        return leases

    def _next_demand(self) -> Lease | None:
        queue = self._demand
        position = 0
        while position < len(queue):
            code = queue[position]
            cache = self.cache_of(code // self.max_experts)
            state = cache.state[code]
            if not cache.pins[code] or state == RESIDENT or code in self.failures:
                del queue[position]
            elif state == LOADING and cache.loads[code].issued == cache.loads[code].num_chunks:
                del queue[position]
            elif state == DRAINING or (state == ABSENT and not self._make_room(cache, code, "pinned")):
                position += 1  # its slot is on the way; the next in line may already have one
            else:
                return self._issue(cache, code, speculative=False)
        return None

    def _next_hint(self) -> Lease | None:
        queue = self._hint_queue
        while queue:
            code = queue[0]
            cache = self.cache_of(code // self.max_experts)
            state = cache.state[code]
            sendable = state == ABSENT or (state == LOADING and cache.loads[code].issued < cache.loads[code].num_chunks)
            if not (sendable and self.is_hinted(code) and code not in self._failed_speculation):
                queue.popleft()
            elif state == ABSENT and not self._make_room(cache, code, "hinted"):
                queue.popleft()  # the visit will ask again, with pins
            else:
                return self._issue(cache, code, speculative=False)
        return None

    def _next_speculation(self) -> Lease | None:
        while (code := self._speculation.most_urgent()) is not None:
            cache = self.cache_of(code // self.max_experts)
            state = cache.state[code]
            if state == LOADING and cache.loads[code].issued < cache.loads[code].num_chunks:
                return self._issue(cache, code, speculative=True)
            if state == ABSENT and self._may_speculate(cache) and self._make_room(cache, code, "speculative"):
                return self._issue(cache, code, speculative=True)
            self._speculation.skip()
        return None

    def _may_speculate(self, cache: ExpertCache) -> bool:
        """Speculation never takes the last slot that demand could have."""
        speculative = sum(load.speculative for load in cache.loads.values())
        return cache.num_pinned + speculative + 1 < cache.num_slots

    def _issue(self, cache: ExpertCache, code: int, speculative: bool) -> Lease:
        layer_idx = code // self.max_experts
        if cache.state[code] == ABSENT:
            load = cache.start_load(code, self._num_chunks[layer_idx], speculative)
            self.eviction.loading(layer_idx, code - layer_idx * self.max_experts)
        else:
            load = cache.loads[code]
            load.speculative = load.speculative and speculative
        lease = Lease(
            self._keys[code], load.issued, load.slot, load.generation, code, "prefetch" if speculative else "demand"
        )
        load.issued += 1
        load.in_flight += 1
        return lease

    # -- who makes room -----------------------------------------------------------------------------------------

    def _make_room(self, cache: ExpertCache, code: int, level: str) -> bool:
        """Have a free slot for an absent expert, if its level of the queue may take one."""
        if cache.num_free:
            return True
        if self._reclaim_load(cache, idle=True, wanted_too=level == "pinned"):
            return True
        victims = self._victims[self._pool_of[code // self.max_experts]]
        victim = victims.next(code, level)
        if victim is not None:
            self._evict(cache, victim)
            return True
        if level == "pinned":
            # Nothing can be dropped at once. Slots >= pins, so some slot is on its way to an expert nobody pinned:
            # stop that; its slot comes free when what is in flight has landed.
            self._reclaim_load(cache, idle=False, wanted_too=True)
        return bool(cache.num_free)

    def _reclaim_load(self, cache: ExpertCache, idle: bool, wanted_too: bool) -> bool:
        """Stop an unpinned load and waste what it fetched; `idle`: only one with nothing in flight."""
        for code, load in cache.loads.items():
            if cache.pins[code] or cache.state[code] == DRAINING or (idle and load.in_flight):
                continue
            layer_idx = code // self.max_experts
            if not wanted_too and (
                self.is_hinted(code) or self._speculation.probability(layer_idx, code) is not None
            ):
                continue
            self._waste(code, load)
            cache.abandon_load(code)
            return True
        return False

    def _evict(self, cache: ExpertCache, code: int) -> None:
        layer_idx = code // self.max_experts
        unused = self._speculative_bytes.pop(code, None)
        if unused:
            self.observer.wasted(layer_idx, unused)
        cache.evict(code)
        self.observer.evicted(layer_idx)

    def _waste(self, code: int, load: Load) -> None:
        self._speculative_bytes.pop(code, None)
        if load.done_bytes:
            self.observer.wasted(code // self.max_experts, load.done_bytes)
        load.done_bytes = 0

    # -- what arrived -------------------------------------------------------------------------------------------

    def chunk_done(self, lease: Lease) -> bool:
        """A chunk's bytes are in its slot. Returns whether this made the expert resident."""
        cache, load = self._take_back(lease)
        if load is None:
            return False
        nbytes = self.config.chunk_bytes[lease.key.layer_idx][lease.chunk_idx]
        self.observer.transferred(lease.key.layer_idx, lease.cause, nbytes)
        if cache.state[lease.code] == DRAINING:
            self.observer.wasted(lease.key.layer_idx, nbytes)
            cache.settle(lease.code)
            return False
        load.done_bytes += nbytes
        if not cache.pins[lease.code]:
            self._speculative_bytes[lease.code] = load.done_bytes
        if not load.complete:
            return False
        cache.finish_load(lease.code)
        return True

    def chunk_failed(self, lease: Lease) -> None:
        """A chunk could not be fetched: its expert goes, and whoever pinned it is told through `Visit.failed`."""
        cache, load = self._take_back(lease)
        if load is None:
            return
        self.observer.failed(lease.cause)
        if cache.pins[lease.code]:
            self.failures.add(lease.code)
        else:
            self._failed_speculation.add(lease.code)
        if cache.state[lease.code] == DRAINING:
            load.failed = True
            cache.settle(lease.code)
        else:
            self._waste(lease.code, load)
            load.failed = True
            cache.abandon_load(lease.code)

    def _take_back(self, lease: Lease) -> tuple[ExpertCache, Load | None]:
        cache = self.cache_of(lease.key.layer_idx)
        load = cache.loads.get(lease.code)
        if load is None or load.generation != lease.generation or load.slot != lease.slot:
            assert not self.config.strict, f"outdated lease {lease}; now {load}"
            self.observer.stale_completion()
            return cache, None
        assert load.in_flight > 0, (lease, load)
        load.in_flight -= 1
        return cache, load

    # -- other --------------------------------------------------------------------------------------------------

    def warm(self, keys: Iterable[ExpertKey]) -> list[Lease]:
        """Leases for every chunk of absent experts that fit into free slots, best first; evicts nothing."""
        leases = []
        for key in keys:
            cache = self.cache_of(key.layer_idx)
            code = key.layer_idx * self.max_experts + key.expert_idx
            if cache.state[code] == ABSENT and cache.num_free:
                leases += [self._issue(cache, code, speculative=False) for _ in range(self._num_chunks[key.layer_idx])]
        return leases

    def check_integrity(self) -> None:
        """Every conservation law of the state machine; raises AssertionError with the numbers."""
        for cache in self._caches:
            cache.check_integrity()
            for code in np.flatnonzero(cache.pin_counts).tolist():
                known = cache.state[code] == RESIDENT or code in self.failures or code in self._demand
                load = cache.loads.get(code)
                issued = load is not None and load.issued == load.num_chunks
                assert known or issued, f"pinned expert {self._keys[code]} is forgotten: {load}"
        for code in self.failures:
            assert self.cache_of(code // self.max_experts).pins[code], f"failure of unpinned {self._keys[code]}"
