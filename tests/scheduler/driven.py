"""Drives a scheduler with simulated surroundings: leases in flight, and a memory that shows what its slots hold.

The memory is hostile: a transfer may write at any time between the issue and the completion of its lease. So a slot's
chunk is spoilt as soon as a lease for it is issued, and right again only when that lease is completed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from promoe.scheduler import ExpertKey, HotExperts, Lease, Scheduler, SchedulerConfig, Visit
from promoe.scheduler.cache import LOADING, RESIDENT, ExpertCache

from .simulated import Tally

Tag = tuple[ExpertKey, int]  # whose bytes, written under which generation
SPOILT = None


class OpenVisit:
    """A visit, and the slots that its ready experts were first seen in: they may not move or change before release."""

    def __init__(self, visit: Visit, ids: Sequence[int]) -> None:
        self.visit = visit
        self.remaining = set(ids)
        self.held: dict[int, tuple[int, int]] = {}  # expert -> slot, generation
        self.begun: dict[int, tuple[int, int]] = {}  # the same of those whose first chunks were seen to be there


class Driven:
    """Drives a scheduler as an engine would, and checks after every operation that no slot holds wrong bytes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.tally = Tally()
        self.scheduler = Scheduler(config, self.tally)
        self.memory: list[list[dict[int, Tag | None]]] = [[{} for _ in range(p.num_slots)] for p in config.pools]
        self.outstanding: list[Lease] = []
        self.returned: list[Lease] = []
        self.visits: list[OpenVisit] = []
        self.causes: Counter[str] = Counter()
        self.steps = 0
        self.num_moved = 0

    # -- operations ---------------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> None:
        hits = self.scheduler.hint(layer_idx, ids)
        assert hits == sum(self.scheduler.is_resident(layer_idx, e) for e in ids)
        self.check()

    def begin(
        self,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        num_sequences: int = 1,
    ) -> OpenVisit:
        opened = OpenVisit(self.scheduler.begin_visit(layer_idx, ids, tokens, num_sequences), ids)
        self.visits.append(opened)
        self.check()
        return opened

    def admit(self, opened: OpenVisit) -> int:
        visit = opened.visit
        waiting = bool(opened.remaining) and not visit.holds_grants
        may_pin = self._may_pin(opened)
        granted = visit.admit()
        assert granted or not (waiting and may_pin), "a pin was to be had and none was granted"
        self.check()
        return granted

    def _may_pin(self, opened: OpenVisit) -> bool:
        """Return whether a pin is to be had for what a visit still needs: by id, for the first expert of it."""
        remaining = sorted(opened.remaining) if self.config.reorder else sorted(opened.remaining)[:1]
        for expert_idx in remaining:
            cache, code = self._cache(ExpertKey(opened.visit.layer_idx, expert_idx))
            # What another visit holds takes no further slot.
            if cache.pins[code] or cache.num_pinned < cache.num_slots:
                return True
        return False

    def run_group(self, opened: OpenVisit, limit: int | None = None) -> int:
        """Compute with (some of) the ready experts and release them."""
        group = opened.visit.ready()[:limit]
        opened.remaining.difference_update(group)
        for expert_idx in group:
            opened.held.pop(expert_idx, None)
            opened.begun.pop(expert_idx, None)
        opened.visit.release(group)
        assert opened.visit.finished == (not opened.remaining)
        self.check()
        return len(group)

    def close(self, opened: OpenVisit) -> None:
        opened.visit.close()
        assert opened.visit.finished
        assert not opened.visit.ready()
        assert not opened.visit.begun()
        self.visits.remove(opened)
        self.check()

    def forecast(self, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> None:
        self.scheduler.forecast(steps_ahead, layer_idx, probabilities)
        self.check()

    def issue(self, count: int = 1) -> list[Lease]:
        issued = []
        for _ in range(count):
            may_have, evictions, warm = self.scheduler.has_orders, self.tally.evictions, list(self.scheduler._warm)
            leases = self.scheduler.next_chunks(1)
            assert may_have or not leases, f"no orders, and then {leases}"
            for lease in leases:
                self._check_lease(lease)
                if not self._is_awaited(lease):
                    assert lease.code in warm, f"nobody asked for {lease}"
                    assert self.tally.evictions == evictions, f"{lease} evicted an expert"
                self._send(lease)
            issued += leases
            if not leases:
                break
        self.check()
        return issued

    def _send(self, lease: Lease) -> None:
        self.causes[lease.cause] += 1
        for other in self.outstanding:
            if other.slot == lease.slot and self._pool(other) == self._pool(lease):
                assert (other.key, other.generation) == (lease.key, lease.generation), (
                    f"{lease} into the slot of {other}"
                )
                assert other.chunk_idx != lease.chunk_idx, f"{lease} sent twice"
        self.outstanding.append(lease)
        self._slot(lease)[lease.chunk_idx] = SPOILT

    def _is_awaited(self, lease: Lease) -> bool:
        """Return whether the lease does more than fill a free slot."""
        layer_idx, scheduler = lease.key.layer_idx, self.scheduler
        hinted = lease.code in scheduler._hinted.get(layer_idx, ())
        return lease.cause == "prefetch" or hinted or bool(self._cache(lease.key)[0].pins[lease.code])

    def _check_lease(self, lease: Lease) -> None:
        scheduler, config = self.scheduler, self.config
        assert lease.code not in scheduler.failures, f"{lease} for an expert that its visit has given up"
        if lease.cause != "prefetch":
            return
        assert config.prefetch
        assert lease.code not in scheduler._failed_speculation, f"{lease} after a failed prefetch"
        cache, _ = self._cache(lease.key)
        # Demand whose earlier load was given up waits until what is on its way for that has come.
        sendable = [c for c in scheduler._demand if scheduler.caches_by_code[c] is cache and cache.state[c] == LOADING]
        assert all(cache.loads[c].all_issued for c in sendable), f"{lease} before demand"
        if not any(other.code == lease.code for other in self.outstanding):
            # Speculation never takes the last slot: neither pinned nor waiting for a chunk.
            pool = self._pool(lease)
            busy = {o.slot for o in [*self.outstanding, lease] if self._pool(o) == pool and not cache.pins[o.code]}
            assert cache.num_pinned + len(busy) < cache.num_slots, f"{lease} took the last slot"

    def complete(self, lease: Lease) -> None:
        self.outstanding.remove(lease)
        self._slot(lease)[lease.chunk_idx] = (lease.key, lease.generation)
        resident = self.scheduler.chunk_done(lease)
        assert not resident or self.scheduler.is_resident(*lease.key)
        self.returned = [*self.returned[-20:], lease]
        self.check()

    def fail(self, lease: Lease) -> None:
        self.outstanding.remove(lease)
        self.scheduler.chunk_failed(lease)
        self.returned = [*self.returned[-20:], lease]
        self.check()

    def withdraw(self) -> None:
        self.scheduler.withdraw_forecasts()
        self.check()

    def warm(self, keys: Sequence[ExpertKey]) -> None:
        self.scheduler.warm(keys)
        self.check()

    def resize(self, pool_idx: int, num_slots: int) -> None:
        """Resize a pool while nothing is in flight or pinned; check that as many residents as fit stay, with their bytes."""
        cache = self.scheduler.caches[pool_idx]
        before, evictions = set(cache.slot_of), self.tally.evictions
        kept = self.scheduler.prepare_resize(pool_idx, num_slots)
        self.check()
        assert len(set(kept.values())) == len(kept) == len(cache.slot_of) == min(len(before), num_slots)
        assert self.tally.evictions - evictions == len(before) - len(kept)
        self.scheduler.resize(pool_idx, num_slots, kept)
        old, new = self.memory[pool_idx], [dict[int, Tag | None]() for _ in range(num_slots)]
        for source, target in kept.items():
            tags = ((idx, tag[0]) for idx, tag in old[source].items() if tag is not SPOILT)
            new[target] = {idx: (key, cache._generation[target]) for idx, key in tags}
        self.memory[pool_idx] = new
        self.num_moved += sum(source != target for source, target in kept.items())
        assert set(cache.slot_of) <= before
        self.check()

    def report_again(self, lease: Lease, failed: bool) -> None:
        """Report a lease done or failed that came back before: this must change nothing."""
        before = self._summary()
        report = self.scheduler.chunk_failed if failed else self.scheduler.chunk_done
        if self.config.strict:
            try:
                report(lease)
            except AssertionError:
                pass
            else:
                raise AssertionError(f"{lease} was taken twice")
        else:
            stale = self.tally.stale
            assert not report(lease)
            assert self.tally.stale == stale + 1
        assert self._summary() == before
        self.check()

    def _summary(self) -> object:
        scheduler = self.scheduler
        loads = [[(c, ld.slot, ld.issued, sorted(ld.pending)) for c, ld in s.loads.items()] for s in scheduler.caches]
        resident = [dict(cache.slot_of) for cache in scheduler.caches]
        return loads, resident, sorted(scheduler.failures), self.tally.moved_bytes, dict(self.tally.failures)

    # -- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check every conservation law, and the bytes of every complete expert, and count a step."""
        self.steps += 1
        scheduler, tally = self.scheduler, self.tally
        scheduler.check_integrity()
        assert tally.moved["prefetch"] == (
            tally.used + tally.wasted_bytes["prefetch"] + scheduler._fetched.pending_bytes()
        ), (tally.moved, tally.used, tally.wasted_bytes)
        assert tally.wasted_bytes["demand"] <= tally.moved["demand"]
        for code in scheduler._fetched._unasked:  # pending bytes are somewhere, and nobody asked for them
            cache = scheduler.caches_by_code[code]
            assert cache.state[code] in (LOADING, RESIDENT), (code, cache.state[code])
            assert not cache.pins[code], code
        in_flight = sum(load.in_flight for cache in scheduler.caches for load in cache.loads.values())
        assert in_flight == len(self.outstanding), (in_flight, self.outstanding)
        for cache, slots in zip(scheduler.caches, self.memory, strict=True):
            for code, slot in cache.slot_of.items():
                self._check_bytes(ExpertKey(*divmod(code, scheduler.max_experts)), slots[slot], cache._generation[slot])
        for opened in self.visits:
            self._check_visit(opened)

    def _check_bytes(
        self, key: ExpertKey, chunks: dict[int, Tag | None], generation: int, count: int | None = None
    ) -> None:
        for chunk_idx in range(len(self._kind(key).chunk_bytes[key.layer_idx]) if count is None else count):
            assert chunks[chunk_idx] == (key, generation), f"{key}, generation {generation}: its slot holds {chunks}"

    def _check_visit(self, opened: OpenVisit) -> None:
        visit = opened.visit
        failed = visit.failed()
        ready = visit.ready()
        assert opened.held.keys() <= set(ready) <= opened.remaining, (opened.held, ready, opened.remaining)
        assert not set(failed) & set(ready), f"failed and ready: {failed}, {ready}"
        for expert_idx in ready:
            key, slot = ExpertKey(visit.layer_idx, expert_idx), visit.slot(expert_idx)
            cache, _ = self._cache(key)
            self._check_bytes(key, self._slots(key)[slot], cache._generation[slot])
            seen = opened.held.setdefault(expert_idx, (slot, cache._generation[slot]))
            assert seen == (slot, cache._generation[slot]), f"expert {expert_idx} moved while a visit could use it"

        self._check_begun(opened, ready, failed)

    def _check_begun(self, opened: OpenVisit, ready: list[int], failed: list[int]) -> None:
        """Check that the chunks of a begun expert stay in its slot until it is ready or has failed."""
        visit = opened.visit
        begun = visit.begun()
        assert not {*begun} & {*ready, *failed}, (begun, ready, failed)
        assert opened.begun.keys() <= {*begun, *ready, *failed}, (opened.begun, begun, ready, failed)
        for expert_idx in begun:
            key, slot = ExpertKey(visit.layer_idx, expert_idx), visit.slot(expert_idx)
            cache, _ = self._cache(key)
            first = self._kind(key).first_chunks[key.layer_idx]
            assert first, key
            opened.begun.setdefault(expert_idx, (slot, cache._generation[slot]))
            self._check_bytes(key, self._slots(key)[slot], cache._generation[slot], first)
        for expert_idx, seen in opened.begun.items():
            if expert_idx not in failed:
                slot = visit.slot(expert_idx)
                cache, _ = self._cache(ExpertKey(visit.layer_idx, expert_idx))
                assert seen == (slot, cache._generation[slot]), f"expert {expert_idx} moved after it was begun"

    def _pool_of(self, key: ExpertKey) -> int:
        """Return the pool that the configuration has for an expert."""
        hot = self._kind(key) is self.config.hot
        (pool_idx,) = (i for i, p in enumerate(self.config.pools) if p.hot == hot and key.layer_idx in p.layers)
        return pool_idx

    def _kind(self, key: ExpertKey) -> SchedulerConfig | HotExperts:
        """Return what has the chunks of an expert."""
        return self.config if self.config.hot is None or key not in self.config.hot.experts else self.config.hot

    def _cache(self, key: ExpertKey) -> tuple[ExpertCache, int]:
        """Return an expert's pool, and its code."""
        return self.scheduler.caches[self._pool_of(key)], key.layer_idx * self.scheduler.max_experts + key.expert_idx

    def _slots(self, key: ExpertKey) -> list[dict[int, Tag | None]]:
        return self.memory[self._pool_of(key)]

    def _pool(self, lease: Lease) -> int:
        return self._pool_of(lease.key)

    def _slot(self, lease: Lease) -> dict[int, Tag | None]:
        return self._slots(lease.key)[lease.slot]

    def _most_chunks(self) -> int:
        hot = self.config.hot
        return max(map(len, [*self.config.chunk_bytes, *(() if hot is None else hot.chunk_bytes)]))

    # -- the end ------------------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """End every open visit, and check that each waits only for what is on its way or can be sent."""
        budget = 50 + 20 * sum(len(v.remaining) + 1 for v in self.visits) * (1 + self._most_chunks())
        budget += len(self.outstanding) + len(self.scheduler._demand) * 4
        while self.visits:
            budget -= 1
            assert budget > 0, f"visits do not end: {[v.remaining for v in self.visits]}"
            moved = 0
            for opened in list(self.visits):
                if opened.visit.finished or opened.visit.failed():
                    self.close(opened)
                    moved += 1
                    continue
                moved += self.admit(opened) + self.run_group(opened)
            moved += len(self.issue(2))
            assert moved or self.outstanding, "visits are open, nothing moves and nothing is on its way"
            if self.outstanding:
                self.complete(self.outstanding[-1])

    def drain(self) -> None:
        """Fetch what is still wanted when no visit is open, and check that nothing more is sent then."""
        assert not self.visits
        total = sum(self.config.num_experts) * 4 * self._most_chunks()
        for _ in range(total):
            if not self.issue() and not self.outstanding:
                break
            if self.outstanding:
                self.complete(self.outstanding[0])
        else:
            raise AssertionError(f"still sending after {total} chunks")
        assert not self.scheduler._demand
        assert not self.scheduler.failures
        assert np.isfinite(self.scheduler.eviction.scores(0)).all()
        assert np.isfinite(
            [
                self.scheduler.calibration.coefficients(layer_idx, steps)
                for layer_idx in range(self.scheduler.config.num_layers)
                for steps in range(1, 5)
            ]
        ).all()
        for cache in self.scheduler.caches:
            assert cache.num_pinned == 0
            assert all(not load.pending for load in cache.loads.values())
