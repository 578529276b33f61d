"""A layer's visit as its forward sees it: groups of experts that have arrived, and waiting for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from promoe.errors import EngineError
from promoe.scheduler import ExpertKey
from promoe.scheduler.visit import Visit
from promoe.stats.counts import Phase
from promoe.stats.tracing import STALL
from promoe.transfer.engine.monitor import Changing
from promoe.transfer.engine.transfers import Transfers
from promoe.transfer.engine.waiter import Waiter
from promoe.transfer.memory import Pool
from promoe.transfer.rows import ExpertRows, FirstRows


class EngineVisit(Waiter):
    """A layer's visit as its forward sees it: `all_rows` when everything is there, else `groups` as they arrive.

    A context manager; made by `Engine.visit`, which describes the arguments.
    """

    def __init__(
        self,
        engine: Transfers,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None,
        num_sequences: int,
        hits: int | None,
        phase: Phase | None,
    ) -> None:
        super().__init__(engine)
        self._layer_idx = layer_idx
        self._ids = ids
        self._tokens = tokens
        self._num_sequences = num_sequences
        self._pools = engine.pools_of_layer[layer_idx]
        self._stall_s = 0.0
        self._late: set[int] = set()  # experts that were not there when their turn came
        self._at_once = False
        self._begin_early = False
        self._group: list[int] = []  # the experts that run now
        self._whole = True  # all tensors of the group's experts are there, and not only the first ones
        self._first_slots: dict[int, int] = {}  # expert -> slot, where the forward was given the first tensors
        self._reading: list[tuple[Pool, list[int]]] = []  # slots that the group's kernels read
        self._hits = hits
        self._phase = phase
        self._visit: Visit | None = None  # while it lasts

    def __enter__(self) -> EngineVisit:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        engine, layer_idx, ids = self._engine, self._layer_idx, self._ids
        with engine.lock:
            engine.check_alive()
            with Changing(engine):
                self._visit = engine.scheduler.begin_visit(layer_idx, ids, self._tokens, self._num_sequences)
                self._visit.admit()
                self._group = self._visit.ready()
                if self._hits is None:  # not the group: without `reorder`, that ends at the first missing expert
                    self._hits = sum(engine.scheduler.is_resident(layer_idx, expert_idx) for expert_idx in ids)
                if len(self._group) < len(ids) and not engine.forwards_copy:
                    engine.wake_workers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_reads()
        finally:  # whatever a device says, what was granted is given back
            self.close(ran=kind is None)

    def close(self, ran: bool = False) -> None:
        """Give back what was granted, and count the visit if it `ran`. Safe to repeat."""
        engine = self._engine
        with engine.lock:
            visit = self._visit
            if visit is None or engine.torn:
                return
            if engine.scheduler is not visit.scheduler:
                if ran:
                    raise self._renewed()
                return
            with Changing(engine):
                if self in engine.waiters:  # Ctrl-C came twice
                    engine.waiters.remove(self)
                self._visit = None
                visit.close()
                if ran:
                    needed, hits = len(self._ids), self._hits or 0
                    ready = needed - len(self._late)
                    engine.recorder.visit(
                        self._layer_idx, self._ids, min(hits, needed), ready, self._stall_s, self._phase
                    )
                engine.wake_workers()
                engine.notify_waiters()

    @property
    def anything_ready(self) -> bool:
        """Whether a group can run without waiting."""
        return bool(self._group)

    def all_rows(self) -> ExpertRows | None:
        """Return the tensors of every needed expert, if all are resident now, or are after some short copies. Else None."""
        if len(self._group) < len(self._ids) and self._engine.forwards_copy:
            start_s, there = time.perf_counter(), self._group
            self._engine.copy_demand()
            with self._engine.lock:
                self._group = self._granted.ready()
            self._late.update(set(self._group).difference(there))
            self._stalled(start_s, time.perf_counter())
        return self._rows() if len(self._group) == len(self._ids) else None

    def groups(self, at_once: bool = False, begin: bool = False) -> Iterator[ExpertRows]:
        """Yield groups of ready experts until all have run. Waits where none is ready.

        A group's rows are valid until the next group is asked for. `FirstRows` stay valid, unless that raises: their
        experts lose their slots when the rest cannot be fetched.

        Args:
            at_once: wait for as many experts as have slots, so that there are as few groups as possible.
            begin: in place of waiting, give the first tensors of an expert, as `FirstRows`. The expert comes again when
                all of it is there. Not with `at_once`.

        Raises:
            ExpertLoadError: a needed expert could not be fetched.
            EngineClosedError, EngineStalledError, EngineError: nothing will come any more.
        """
        self._at_once, self._begin_early = at_once, begin and not at_once
        if at_once or not self._group:
            self._group = []
            self._group = self._next_group()
        while self._group:
            yield self._rows() if self._whole else self._first_rows()
            self._group = self._next_group()

    @property
    def _granted(self) -> Visit:
        """The scheduler's visit.

        Raises:
            EngineError: the engine was renewed meanwhile.
        """
        assert self._visit is not None, "the visit is over"
        if self._engine.scheduler is not self._visit.scheduler:
            raise self._renewed()
        return self._visit

    def _renewed(self) -> EngineError:
        return EngineError(
            f"The slots that MoE layer {self._layer_idx} computed with were given to others: the engine was renewed meanwhile. "
            "Start the generation again."
        )

    def _rows(self) -> ExpertRows:
        visit = self._granted
        slots = {expert_idx: visit.slot(expert_idx) for expert_idx in self._group}
        for expert_idx, slot in slots.items():
            assert self._first_slots.get(expert_idx, slot) == slot, f"expert {expert_idx} was begun in another slot"
        by_pool = self._by_pool(slots)
        self._reading = [(pool, list(of_pool.values())) for pool, of_pool in by_pool]
        for pool, read in self._reading:
            pool.begin_read(read)
        return _rows_in(by_pool)

    def _first_rows(self) -> FirstRows:
        config, layer_idx = self._engine.scheduler.config, self._layer_idx
        of_kind = self._engine.first_names[layer_idx]
        rows = _rows_in(self._by_pool({expert_idx: self._first_slots[expert_idx] for expert_idx in self._group}))
        names = {idx: of_kind[config.is_hot(ExpertKey(layer_idx, idx))] for idx in rows}
        return FirstRows({idx: {name: tensors[name] for name in names[idx]} for idx, tensors in rows.items()})

    def _by_pool(self, slots: dict[int, int]) -> list[tuple[Pool, dict[int, int]]]:
        """Return each pool that has some of these slots (expert -> slot), and which."""
        if len(self._pools) == 1:
            return [(self._pools[0], slots)]
        engine = self._engine
        base = self._layer_idx * engine.scheduler.max_experts
        found = [
            (pool, {idx: slot for idx, slot in slots.items() if engine.pool_of[base + idx] is pool})
            for pool in self._pools
        ]
        return [(pool, of_pool) for pool, of_pool in found if of_pool]

    def _end_reads(self) -> None:
        for pool, slots in self._reading:
            pool.end_read(slots)
        self._reading = []

    def _next_group(self) -> list[int]:
        """Give back the group that ran. Return the next one, or nothing if all have run."""
        engine, visit = self._engine, self._granted
        self._end_reads()
        with engine.lock:
            with Changing(engine):
                if self._whole:
                    visit.release(self._group)
                engine.progress += 1
                admitted = visit.admit()
                if engine.waiters or (admitted and not engine.forwards_copy):
                    engine.wake_workers()
                engine.notify_waiters()  # another visit may be granted what this one gave back
            if visit.finished:
                return []
            there = visit.ready()
            if group := self._runnable(there):
                return group
        start_s = time.perf_counter()
        if engine.forwards_copy:
            engine.copy_demand()
        return self._wait(there, start_s)

    def may_go_on(self) -> bool:
        """Return whether there is a group to run, or an error to raise, with the engine's lock held."""
        visit = self._visit
        return visit is not None and (self._suffices(visit.ready()) or bool(visit.failed() or self._beginning()))

    def _who(self) -> str:
        return f"MoE layer {self._layer_idx} waits for experts"

    def _suffices(self, ready: Sequence[int]) -> bool:
        """Return whether these experts are a group to run now."""
        return bool(ready) and (not self._at_once or len(ready) == self._granted.num_granted)

    def _beginning(self) -> list[int]:
        """Return the experts whose first tensors have come, and were not given to the forward yet."""
        return [idx for idx in self._granted.begun() if idx not in self._first_slots] if self._begin_early else []

    def _runnable(self, ready: list[int]) -> list[int]:
        """Return what to run now, with the engine's lock held: whole experts, else what can be begun of others."""
        self._whole = self._suffices(ready)
        if self._whole:
            return ready
        beginning = self._beginning()
        self._first_slots.update((expert_idx, self._granted.slot(expert_idx)) for expert_idx in beginning)
        self._late.update(beginning)
        return beginning

    def _wait(self, there: Sequence[int], start_s: float) -> list[int]:
        """Wait until a group may run. The experts in `there` were ready at `start_s`."""
        try:
            group = self._wait_for(self._look)
            self._late.update(set(group).difference(there))
            return group
        finally:
            self._stalled(start_s, time.perf_counter())

    def _stalled(self, start_s: float, end_s: float) -> None:
        self._stall_s += end_s - start_s
        if (tracer := self._engine.tracer) is not None:
            tracer.span(STALL, f"wait L{self._layer_idx}", start_s, end_s, layer=self._layer_idx)

    def _look(self) -> list[int] | None:
        """Return a group that may run, with the engine's lock held. None: wait to be notified."""
        engine, visit = self._engine, self._granted
        while True:
            if failed := visit.failed():
                raise engine.load_error(self._layer_idx, failed)
            if group := self._runnable(visit.ready()):
                return group
            with Changing(engine):
                if visit.holds_grants or not visit.admit():
                    return None
                engine.wake_workers()


def _rows_in(by_pool: Sequence[tuple[Pool, dict[int, int]]]) -> ExpertRows:
    """Return the tensors of experts by the slots that they are in (expert -> slot), in one pool or several."""
    if len(by_pool) == 1:
        pool, slots = by_pool[0]
        return pool.rows([*slots], [*slots.values()])
    return {idx: tensors for pool, slots in by_pool for idx, tensors in pool.rows([*slots], [*slots.values()]).items()}
