"""The transfer engine: threads that move chunks as the scheduler orders, and forwards that wait for them.

One lock guards the scheduler and the counters. It is held for microseconds: never during I/O, copies, predictors or
expert computation, nor while a forward waits. Knows links, slots and errors; does not know models.

Ctrl-C may end a forward anywhere. Whatever it had been granted or had begun is then given back; only if it comes in the midst
of a change of the scheduler's state, that cannot be trusted any more, and the engine says so from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from promoe.errors import EngineClosedError, EngineError, EngineStalledError, ExpertLoadError, PromoeError
from promoe.links import Link
from promoe.memory import Pool, SlotPool
from promoe.recorder import Recorder
from promoe.scheduler import ExpertKey, Lease, Scheduler
from promoe.scheduler.visit import Visit
from promoe.stores import Store
from promoe.threads import ThreadBeside, hold_in_forks, stop_at_exit
from promoe.tracing import STALL, Tracer, link_worker

logger = logging.getLogger(__name__)

Rows = Mapping[int, Mapping[str, torch.Tensor]]
"""Expert id -> its tensors in a slot, by parameter name."""

# Up to here, a chunk that lies in RAM is copied by the forward that needs it: two turns of other threads take longer.
SHORT_CHUNK_BYTES = 64 * 1024
# How often a waiting forward looks up to see whether anything moved at all.
HEARTBEAT_S = 1.0


class Engine:
    """Serves expert weights from a store into slots, by a scheduler's orders. Start with `start`, end with `close`.

    Args:
        scheduler: decides; driven by this engine alone.
        store: where the chunks of an expert lie.
        link: moves one chunk; `link.workers` threads call it.
        pools: one per pool of the scheduler, in its order.
        recorder: counts; guarded by this engine's lock.
        stall_timeout_s: a forward that waits while no chunk completes for this long raises EngineStalledError.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        link: Link,
        pools: Sequence[Pool],
        recorder: Recorder,
        stall_timeout_s: float = 60.0,
    ) -> None:
        self.scheduler = scheduler
        self.store = store
        self.link = link
        self.pools = tuple(pools)
        self.recorder = recorder
        self.stall_timeout_s = stall_timeout_s
        self.tracer: Tracer | None = None
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._idle_workers = 0
        self._assigned: deque[Lease] = deque()  # to workers that were idle and have not taken them yet
        longest = max(max(chunks) for chunks in scheduler.config.chunk_bytes)
        self._forwards_copy = link.copies_from_ram and longest <= SHORT_CHUNK_BYTES
        self._waiting_visits: list[EngineVisit] = []
        self._chunks_completed = 0
        self._progress = 0  # completions, and groups that other forwards have run: what a waiting forward looks for
        self._closed = False
        self._ending = False  # the process
        self._broken: tuple[str, BaseException | None] | None = None  # what happened; nothing is served any more
        self._torn = False  # the scheduler's state cannot be trusted, and is not touched any more
        self._load_errors: dict[ExpertKey, tuple[Lease, BaseException]] = {}
        self._pool_of = {
            layer: pool for spec, pool in zip(scheduler.config.pools, pools, strict=True) for layer in spec.layers
        }
        if scheduler.config.strict:
            self._poison_released_slots()
        self._threads = [ThreadBeside(partial(self._serve, idx), f"promoe-link-{idx}") for idx in range(link.workers)]

    def start(self) -> None:
        """Start the link workers."""
        hold_in_forks(self, self.lock, Engine._forked)
        stop_at_exit(self, Engine._end)
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop the workers (the chunks in flight land first) and wake whoever waits. Safe to repeat.

        A worker whose transfer does not return within `stall_timeout_s` is left behind: its source hangs, and so would
        we. Its slot's memory lives as long as it does.
        """
        with self.lock:
            self._closed = True
            self._work.notify_all()
            self._notify_visits()
        # No limit at all (inf) is more than a thread can be waited for.
        deadline_s = time.perf_counter() + min(self.stall_timeout_s, threading.TIMEOUT_MAX)
        workers = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in workers:
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - time.perf_counter()))
        if stuck := [thread.name for thread in workers if thread.is_alive()]:
            logger.warning("%s still in a transfer after %.1f s; left behind.", ", ".join(stuck), self.stall_timeout_s)
        self.link.close()

    def _end(self) -> None:
        """The process ends: nothing is begun any more. Forwards of daemon threads wait for their end, without a word."""
        with self.lock:
            self._ending = True
            self._work.notify_all()

    def _poison_released_slots(self) -> None:
        """From now on, a slot in RAM without an expert holds NaN: whoever reads one shows it."""
        for spec, pool in zip(self.scheduler.config.pools, self.pools, strict=True):
            if isinstance(pool, SlotPool):
                pool.poison()
                self.scheduler.cache_of(spec.layers[0]).on_release = pool.poison_slot

    # -- the forwards' side -------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """A gate chose these experts: start what is missing. Returns how many are resident."""
        with self.lock:
            if self._torn:
                return 0  # the visit will say so
            with _Changing(self):
                hits = self.scheduler.hint(layer_idx, ids)
                if hits < len(ids) and not self._forwards_copy:
                    self._wake_workers()
        return hits

    def visit(
        self,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        num_sequences: int = 1,
        hits: int | None = None,
    ) -> EngineVisit:
        """Begin a layer's visit (see `Scheduler.begin_visit`); use it as a context manager.

        Args:
            layer_idx: the MoE layer.
            ids: distinct experts that its tokens use.
            tokens: experts of each real token, for the reuse prior.
            num_sequences: tokens expected at the layer's next visit.
            hits: how many were resident at gate time, if a hint for these ids was given; for the counters.
        """
        return EngineVisit(self, layer_idx, ids, tokens, num_sequences, hits)

    def forecast(self, origin_step: int, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> bool:
        """Hand a forecast to the scheduler, unless its layer's turn has come meanwhile; says whether it was in time.

        Args:
            origin_step: scheduler step of the visit that it was made from.
            steps_ahead: layer visits from that one to the one forecast.
            layer_idx: the layer forecast.
            probabilities: `[num_experts]`.
        """
        p_next = np.asarray(probabilities, dtype=np.float64)  # what is no number must not end in the midst of a change
        with self.lock:
            remaining = steps_ahead - max(0, self.scheduler.step - origin_step)
            if remaining <= 0 or self._closed or self._torn:
                return False
            with _Changing(self):
                self.scheduler.forecast(remaining, layer_idx, p_next)
                self._wake_workers()
        return True

    def stream(self, layer_idx: int) -> None:
        """The layer after the one just hinted will need nearly all its experts: fetch the absent ones in order."""
        with self.lock:
            if self._torn:
                return
            with _Changing(self):
                self.scheduler.stream(2, layer_idx)  # the hint precedes its visit, which will be the next step
                self._wake_workers()

    def set_prefetch(self, on: bool) -> None:
        """Switch prefetch on or off; off also withdraws what is forecast. Counters know since when."""
        with self.lock:
            if on == self.scheduler.prefetch_on or self._torn:
                return
            with _Changing(self):
                self.scheduler.prefetch_on = on
                self.recorder.prefetch_switched(on)
                if not on:
                    self.scheduler.withdraw_forecasts()

    def _wake_workers(self) -> None:
        """Give idle workers what there is to do, with the lock held.

        The order is taken here and not by the worker: until that has the interpreter to itself, hundreds of microseconds
        pass in which the link could have been busy.
        """
        while self._idle_workers and not self._closed and (lease := self._next_order()) is not None:
            self._assigned.append(lease)
            self._idle_workers -= 1
            self._work.notify()

    def _notify_visits(self) -> None:
        """Let waiting forwards look again, with the lock held."""
        for visit in self._waiting_visits:
            visit.notify()

    def _break(self, what: str, cause: BaseException | None) -> None:
        """Refuse to serve from now on, with the lock held."""
        if self._broken is None:
            self._broken = (what, cause)
            self._notify_visits()

    def _break_off(self, error: BaseException) -> None:
        """An exception came in the midst of a change, with the lock held."""
        if not isinstance(error, PromoeError):
            self._torn = True
            self._break(f"Its state was being changed when this came: {error!r}.", error)

    def _forked(self) -> None:
        """This is a new process, which has a copy of everything but the threads; with the lock held."""
        self.scheduler.prefetch_on = False  # or the forward would hand visits to a predictor's thread that is not there
        self._broken = None
        self._break("This process was forked from the one that patched the model, whose link workers it lacks.", None)

    def _check_alive(self) -> None:
        if self._broken is not None:
            what, cause = self._broken
            raise EngineError(
                f"{what} The model cannot fetch experts any more: call promoe.unpatch(model) and patch it again, or open "
                "the model again, in the process that uses it."
            ) from cause
        if self._closed:
            raise EngineClosedError(
                "The model's experts were needed after its engine was closed. Call promoe.unpatch(model), "
                "or open the model again."
            )

    def _load_error(self, layer_idx: int, expert_ids: Sequence[int]) -> ExpertLoadError:
        key = ExpertKey(layer_idx, expert_ids[0])
        lease, cause = self._load_errors.get(key, (None, None))
        where = "" if lease is None else f" ({self.store.describe(self.store.chunks(key)[lease.chunk_idx])})"
        error = ExpertLoadError(
            f"Expert {key.expert_idx} of MoE layer {layer_idx} could not be fetched{where}: {cause}. "
            "The forward was stopped and its KV cache is incomplete: start the generation again once the cause is mended."
        )
        error.__cause__ = cause
        return error

    def state(self) -> str:
        """The state of the engine in words, for error messages."""
        scheduler = self.scheduler
        caches = [scheduler.cache_of(spec.layers[0]) for spec in scheduler.config.pools]
        pools = "; ".join(
            f"pool {i}: {c.num_slots} slots, {c.num_free} free, {len(c.slot_of)} resident, {c.num_pinned} pinned, "
            f"{sum(load.in_flight for load in c.loads.values())} chunks in flight"
            for i, c in enumerate(caches)
        )
        return (
            f"step {scheduler.step}, layer {scheduler.current_layer}, {self._chunks_completed} chunks completed, "
            f"{self._idle_workers} of {len(self._threads)} workers idle, link: {self.link.describe()}; {pools}"
        )

    # -- the workers' side --------------------------------------------------------------------------------------

    def _serve(self, worker_idx: int) -> None:
        try:
            while (lease := self._next_lease()) is not None:
                orders = [lease]
                while orders:
                    self._complete(orders, self._transfer(orders[0], worker_idx))
        except BaseException as error:
            logger.exception("link worker %d died", worker_idx)
            with self.lock:
                self._break(f"A link worker died: {error!r}.", error)

    def _next_lease(self) -> Lease | None:
        with self.lock:
            self._idle_workers += 1
            self._wake_workers()
            while not self._assigned:
                if self._closed or self._ending:
                    return None
                self._work.wait()
            return self._assigned.popleft()

    def _transfer(self, lease: Lease, worker_idx: int) -> Exception | None:
        pool = self._pool_of[lease.key.layer_idx]
        chunk = self.store.chunks(lease.key)[lease.chunk_idx]
        start_s = time.perf_counter()
        try:
            self.link.transfer(chunk, pool.slot(lease.slot), pool.address(lease.slot))
        except Exception as error:  # whatever a link raises is reported to the forward that needs the expert
            return error
        if (tracer := self.tracer) is not None:  # another thread may end the timeline at any time
            tracer.span(
                link_worker(worker_idx),
                f"{lease.cause} L{lease.key.layer_idx} E{lease.key.expert_idx}",
                start_s,
                time.perf_counter(),
                chunk=lease.chunk_idx,
                nbytes=chunk.nbytes,
            )
        return None

    def copy_demand(self) -> None:
        """Fetch in this thread what is demanded now. A failure is published, for the visit to raise."""
        orders: list[Lease] = []
        try:
            with self.lock, _Changing(self):
                self._take_order(orders, speculate=False)
            while orders:
                self._complete(orders, self._transfer(orders[0], self.link.workers), speculate=False)
        except BaseException as interruption:
            while orders:  # each completion brings the next order: none may be left behind
                self._complete(orders, EngineError(f"The copy was interrupted by {interruption!r}."), speculate=False)
            raise

    def _complete(self, orders: list[Lease], error: Exception | None, speculate: bool = True) -> None:
        """Publish the completion of the only one of `orders`, and put the next in its place in the same breath."""
        first_failure = False
        with self.lock, _Changing(self):
            lease = orders.pop()
            if self._torn:
                return
            self._progress += 1
            self._chunks_completed += 1
            first_failure = error is not None and self._failed(lease, error)
            if error is None and self.scheduler.chunk_done(lease):
                self._load_errors.pop(lease.key, None)
                if any(visit._may_go_on() for visit in self._waiting_visits):
                    self._notify_visits()
            self._take_order(orders, speculate)
            if speculate:
                self._wake_workers()  # where there is one order there may be more
        if first_failure and lease.cause == "prefetch":
            # As text: an error that a log keeps would keep the slots that its traceback knows.
            logger.warning("prefetch of %s failed, it will be fetched on demand: %s", lease.key, str(error))

    def _failed(self, lease: Lease, error: Exception) -> bool:
        """Publish a failure, with the lock held; says whether it is the expert's first since it last arrived."""
        first = lease.key not in self._load_errors
        self._load_errors[lease.key] = (lease, error)
        self.scheduler.chunk_failed(lease)
        self._notify_visits()
        return first

    def _take_order(self, orders: list[Lease], speculate: bool) -> None:
        if not self._closed and (lease := self._next_order(speculate)) is not None:
            orders.append(lease)

    def _next_order(self, speculate: bool = True) -> Lease | None:
        if self._broken is not None or self._ending or not self.scheduler.has_orders:
            return None
        leases = self.scheduler.next_chunks(1, speculate)
        return leases[0] if leases else None


class _Changing:
    """A change of the scheduler's state, with the engine's lock held: what an exception in its midst leaves cannot be trusted.

    Not a generator, which takes several times as long: this is on the path of every layer.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._engine._break_off(error)


class EngineVisit:
    """A layer's visit, as its forward sees it: `all_rows` when everything is there, else `groups` as they arrive."""

    def __init__(
        self,
        engine: Engine,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None,
        num_sequences: int,
        hits: int | None,
    ) -> None:
        self._engine = engine
        self._layer_idx = layer_idx
        self._ids = ids
        self._tokens = tokens
        self._num_sequences = num_sequences
        self._pool = engine._pool_of[layer_idx]
        self._stall_s = 0.0
        self._waited_for = 0
        self._at_once = False
        self._group: list[int] = []
        self._reading: list[int] = []  # slots
        self._hits = hits
        self._visit: Visit | None = None  # while it lasts
        self._notified = threading.Lock()  # held while there is nothing to look at

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
            engine._check_alive()
            with _Changing(engine):
                self._visit = engine.scheduler.begin_visit(layer_idx, ids, self._tokens, self._num_sequences)
                self._visit.admit()
                self._group = self._visit.ready()
                if self._hits is None:  # not the group: without `reorder`, that ends at the first that is missing
                    self._hits = sum(engine.scheduler.is_resident(layer_idx, expert_idx) for expert_idx in ids)
                if len(self._group) < len(ids) and not engine._forwards_copy:
                    engine._wake_workers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_reads()
        finally:  # whatever a device says: what is granted is given back
            self.close(ran=kind is None)

    def close(self, ran: bool = False) -> None:
        """Give back what was granted, and count the visit if it `ran`. Safe to repeat."""
        engine = self._engine
        with engine.lock:
            visit = self._visit
            if visit is None or engine._torn:
                return
            with _Changing(engine):
                if self in engine._waiting_visits:  # Ctrl-C came twice
                    engine._waiting_visits.remove(self)
                self._visit = None
                visit.close()
                if ran:
                    needed, hits = len(self._ids), self._hits or 0
                    engine.recorder.visit(
                        self._layer_idx, self._ids, min(hits, needed), needed - self._waited_for, self._stall_s
                    )
                engine._wake_workers()
                engine._notify_visits()

    def notify(self) -> None:
        """Let a wait look at once, with the engine's lock held."""
        if self._notified.locked():
            self._notified.release()

    def all_rows(self) -> Rows | None:
        """The tensors of every needed expert, if all are resident now, or are after some short copies; else None."""
        if len(self._group) < len(self._ids) and self._engine._forwards_copy:
            start_s, num_there = time.perf_counter(), len(self._group)
            self._engine.copy_demand()
            with self._engine.lock:
                self._group = self._granted.ready()
            self._waited_for += len(self._group) - num_there
            self._stall_s += time.perf_counter() - start_s
        return self._rows() if len(self._group) == len(self._ids) else None

    def groups(self, at_once: bool = False) -> Iterator[Rows]:
        """Groups of ready experts until all have run; waits where none is ready.

        Rows of a group are valid until the next one is asked for.

        Args:
            at_once: wait for all that there may be slots for, so that groups are as few as possible.

        Raises:
            ExpertLoadError: a needed expert could not be fetched.
            EngineClosedError, EngineStalledError, EngineError: nothing will come any more.
        """
        self._at_once = at_once
        if at_once or not self._group:
            self._group = []
            self._group = self._next_group()
        while self._group:
            yield self._rows()
            self._group = self._next_group()

    @property
    def _granted(self) -> Visit:
        assert self._visit is not None, "the visit is over"
        return self._visit

    def _rows(self) -> Rows:
        pool, visit = self._pool, self._granted
        self._reading = [visit.slot(expert_idx) for expert_idx in self._group]
        pool.begin_read(self._reading)
        return pool.rows(self._group, self._reading)

    def _end_reads(self) -> None:
        self._pool.end_read(self._reading)
        self._reading = []

    def _next_group(self) -> list[int]:
        engine, visit = self._engine, self._granted
        self._end_reads()
        with engine.lock:
            with _Changing(engine):
                visit.release(self._group)
                engine._progress += 1
                admitted = visit.admit()
                if engine._waiting_visits or (admitted and not engine._forwards_copy):
                    engine._wake_workers()
                engine._notify_visits()  # another visit may be granted what this one gave back
            if visit.finished:
                return []
            there = visit.ready()
            if self._suffices(there):
                return there
        start_s = time.perf_counter()
        if engine._forwards_copy:
            engine.copy_demand()
        return self._wait(len(there), start_s)

    def _may_go_on(self) -> bool:
        """Whether waiting, with the engine's lock held, is over."""
        visit = self._visit
        return visit is not None and (self._suffices(visit.ready()) or bool(visit.failed()))

    def _suffices(self, ready: Sequence[int]) -> bool:
        """Whether these experts are a group to run now."""
        return bool(ready) and (not self._at_once or len(ready) == self._granted.num_granted)

    def _wait(self, num_there: int, start_s: float) -> list[int]:
        """Wait until a group may run; `num_there` of it were ready at `start_s`.

        Not on a condition of the engine's lock: Ctrl-C while that is taken again would leave without it.
        """
        engine = self._engine
        last_progress_s, progress = time.perf_counter(), -1
        try:
            while True:
                with engine.lock:
                    if (group := self._look()) is not None:
                        self._waited_for += len(group) - num_there
                        return group
                    now_s = time.perf_counter()
                    if engine._progress != progress:
                        progress, last_progress_s = engine._progress, now_s
                    elif now_s - last_progress_s > engine.stall_timeout_s:
                        raise EngineStalledError(
                            f"MoE layer {self._layer_idx} waits for experts and no chunk completed for "
                            f"{now_s - last_progress_s:.1f} s (stall_timeout_s={engine.stall_timeout_s}). "
                            f"State: {engine.state()}. Check the disk, or raise stall_timeout_s."
                        )
                self._notified.acquire(timeout=min(HEARTBEAT_S, engine.stall_timeout_s))
        finally:
            with engine.lock:
                if self in engine._waiting_visits:
                    engine._waiting_visits.remove(self)
            end_s = time.perf_counter()
            self._stall_s += end_s - start_s
            if (tracer := engine.tracer) is not None:
                tracer.span(STALL, f"wait L{self._layer_idx}", start_s, end_s)

    def _look(self) -> list[int] | None:
        """A group that may run, with the engine's lock held; None: wait until `notify`."""
        engine, visit = self._engine, self._granted
        while True:
            engine._check_alive()
            if failed := visit.failed():
                raise engine._load_error(self._layer_idx, failed)
            if self._suffices(group := visit.ready()):
                return group
            with _Changing(engine):
                if visit.holds_grants or not visit.admit():
                    self._notified.acquire(blocking=False)  # what came before has been looked at
                    if self not in engine._waiting_visits:
                        engine._waiting_visits.append(self)
                    return None
                engine._wake_workers()
