"""The scheduler behind one lock: who may change it, who waits for it, and what becomes of what it orders.

The lock is held for microseconds: never during I/O, copies, predictors or expert computation, nor while a forward waits.

Ctrl-C may end a forward anywhere. Whatever it had been granted or had begun is then given back; only if it comes in the midst
of a change of the scheduler's state, that cannot be trusted any more, and nothing is served until the engine was renewed: with
another scheduler, and nothing in the slots. Signal handlers run there, too, in the thread that holds the lock: so it lets them
in, and a change says no to another one in its midst.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from promoe.errors import (
    EngineClosedError,
    EngineError,
    EngineStalledError,
    ExpertLoadError,
    PatchStateError,
    PromoeError,
)
from promoe.scheduler import ExpertKey, Lease, Scheduler
from promoe.stats.recorder import Recorder
from promoe.stats.tracing import LINK_IN_FORWARD, Tracer, link_worker
from promoe.stores import Store, first_tensors
from promoe.stores.base import Chunk
from promoe.transfer.lifetimes import without_frames
from promoe.transfer.links import Link
from promoe.transfer.memory import Pool

logger = logging.getLogger(__name__)

# Up to here, a chunk that lies in RAM is copied by the forward that needs it: two turns of other threads take longer.
SHORT_CHUNK_BYTES = 64 * 1024


class Waiting(Protocol):
    """A forward that waits for experts, or who warms or resizes the cache."""

    def may_go_on(self) -> bool:
        """Whether its wait is over; asked with the lock held."""
        ...

    def notify(self) -> None:
        """Let it look; with the lock held."""
        ...


class Monitor:
    """What forwards and link workers share, and what they do with it; see `Engine`, which is one with threads.

    Attributes:
        lock: guards the scheduler, the recorder and all that is here.
        link: moves chunks. Every transfer looks it up, so a link over it (a `MeteredLink`, a `FaultyLink`) may take its place
            at any time.
        waiting_visits: forwards that wait for a chunk, or for what another forward will give back; and who warms or resizes
            the cache.
        progress: completions, and groups that forwards have run: what a waiting forward looks for.
        first_names: of each layer, the tensors that come with the first chunks of its experts (`first_chunks`).
        queues: whether `copy_demand` only queues copies for a device, so that it need not wait for the visit.
        forwards_copy: whether forwards fetch for themselves, with `copy_demand`, rather than workers for them.
        held: who wants nothing to be sent for now.
        times_held: how often the calling thread has the lock: more than once where a signal handler, or a finalizer,
            interrupted it there.
        torn: the scheduler's state cannot be trusted, and is not touched any more.
        renewable: the slots themselves can be.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        link: Link,
        pools: Sequence[Pool],
        recorder: Recorder,
        stall_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.store = store
        self.link = link
        self.pools = tuple(pools)
        self.recorder = recorder
        self.stall_timeout_s = stall_timeout_s
        self.clock = clock
        self.tracer: Tracer | None = None
        # Python 3.10 does not say how often one is held: there, a signal handler that needs it waits for ever.
        self.lock: Any = threading.RLock() if hasattr(threading.RLock(), "_recursion_count") else threading.Lock()
        self.times_held: Callable[[], int] = getattr(self.lock, "_recursion_count", _once)
        self.pool_of = {
            layer: pool for spec, pool in zip(scheduler.config.pools, pools, strict=True) for layer in spec.layers
        }
        self.first_names = [
            first_tensors(store, layer_idx, count) for layer_idx, count in enumerate(scheduler.config.first_chunks)
        ]
        longest = max(max(chunks) for chunks in scheduler.config.chunk_bytes)
        self.queues = link.queues
        self.forwards_copy = link.queues or (link.copies_from_ram and longest <= SHORT_CHUNK_BYTES)
        self.waiting_visits: list[Waiting] = []
        self.progress = 0
        self.held: Waiting | None = None
        self.torn = False
        self.renewable = True
        self._work = threading.Condition(self.lock)
        self._idle_workers = 0
        self._assigned: deque[Lease] = deque()  # to workers that were idle and have not taken them yet
        self._working = set(range(link.workers))  # those that do not wait for an order
        self._chunks_completed = 0
        self._closed = False
        self._ending = False  # the process
        self._broken: tuple[str, BaseException | None] | None = None  # what happened; nothing is served any more
        self._load_errors: dict[ExpertKey, tuple[Lease, BaseException]] = {}

    @property
    def interrupted(self) -> bool:
        """Whether the calling thread has the lock: it is in a signal handler, or a finalizer, that interrupted it there."""
        owned: bool = getattr(self.lock, "_is_owned", bool)()
        return owned

    # -- what can be served at all ------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise if nothing is served any more.

        Raises:
            EngineError: something broke, or this process was forked.
            EngineClosedError: it was closed.
        """
        if self._broken is not None:
            what, cause = self._broken
            if self.torn and self.renewable:
                raise EngineError(
                    f"{what} The model's next forward begins with an empty cache, once no other forward of it runs."
                ) from cause
            raise EngineError(
                f"{what} The model cannot fetch experts any more: open it again in the process that uses it, or, if it was "
                "patched in RAM, call promoe.unpatch(model) and patch it again."
            ) from cause
        if self._closed:
            raise EngineClosedError(
                "The model's experts were needed after its engine was closed. Open the model again, or call "
                "promoe.unpatch(model), which reads those that were left on disk into RAM, all of them."
            )

    def _break(self, what: str, cause: BaseException | None) -> None:
        """Refuse to serve from now on, with the lock held."""
        if self._broken is None:
            self._broken = (what, None if cause is None else without_frames(cause))
            self.notify_visits()

    def break_off(self, error: BaseException) -> None:
        """An exception came in the midst of a change, with the lock held."""
        if not isinstance(error, PromoeError) or isinstance(error, _InterruptsChangeError):
            self.torn = True
            self._break(f"Its state was being changed when this came: {error!r}.", error)

    def load_error(self, layer_idx: int, expert_ids: Sequence[int]) -> ExpertLoadError:
        """What to raise where these experts failed: names the first, where it lies, and why."""
        key = ExpertKey(layer_idx, expert_ids[0])
        lease, cause = self._load_errors.get(key, (None, None))
        where = "" if lease is None else f" ({self.store.describe(self.store.chunks(key)[lease.chunk_idx])})"
        error = ExpertLoadError(
            f"Expert {key.expert_idx} of MoE layer {layer_idx} could not be fetched{where}: {cause}. "
            "The forward was stopped and its KV cache is incomplete: start the generation again once the cause is mended."
        )
        error.__cause__ = cause
        return error

    def failed_experts(self, keys: Iterable[ExpertKey]) -> dict[ExpertKey, BaseException]:
        """Those of `keys` whose latest fetch failed, and why; with the lock held."""
        return {key: self._load_errors[key][1] for key in keys if key in self._load_errors}

    def stalled(self, who: str, waited_s: float) -> EngineStalledError:
        """What to raise where nothing has moved for too long, with the lock held."""
        return EngineStalledError(
            f"{who} and no chunk completed for {waited_s:.1f} s (stall_timeout_s={self.stall_timeout_s}). "
            f"State: {self.state()}. Check the disk, or raise stall_timeout_s."
        )

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
            f"{self._idle_workers} of {self.link.workers} workers idle, link: {self.link.describe()}; {pools}"
        )

    # -- who does what --------------------------------------------------------------------------------------------

    def wake_workers(self) -> None:
        """Give idle workers what there is to do, with the lock held.

        The order is taken here and not by the worker: until that has the interpreter to itself, hundreds of microseconds
        pass in which the link could have been busy.
        """
        while self._idle_workers and not self._closed and (lease := self._next_order()) is not None:
            self._assigned.append(lease)
            self._idle_workers -= 1
            self._work.notify()

    def notify_visits(self) -> None:
        """Let waiting forwards look again, with the lock held."""
        for visit in self.waiting_visits:
            visit.notify()

    def _take_order(self, orders: list[Lease], speculate: bool) -> None:
        if not self._closed and (lease := self._next_order(speculate)) is not None:
            orders.append(lease)

    @property
    def _may_order(self) -> bool:
        return not (self._broken is not None or self._ending or self.held) and self.scheduler.has_orders

    def _next_order(self, speculate: bool = True) -> Lease | None:
        if not self._may_order:
            return None
        leases = self.scheduler.next_chunks(1, speculate)
        return leases[0] if leases else None

    # -- transfers ------------------------------------------------------------------------------------------------

    def _transfer(self, lease: Lease, worker_idx: int) -> Exception | None:
        pool = self.pool_of[lease.key.layer_idx]
        chunk = self.store.chunks(lease.key)[lease.chunk_idx]
        start_s = time.perf_counter()
        try:
            self.link.transfer(chunk, pool.slot(lease.slot), pool.address(lease.slot))
        except Exception as error:  # whatever a link raises is reported to the forward that needs the expert
            return error
        self._trace(lease, worker_idx, start_s)
        return None

    def _trace(self, lease: Lease, worker_idx: int, start_s: float) -> None:
        if (tracer := self.tracer) is not None:  # another thread may end the timeline at any time
            chunks = self.store.chunks(lease.key)[lease.chunk_idx : lease.chunk_idx + lease.num_chunks]
            tracer.span(
                LINK_IN_FORWARD if worker_idx == self.link.workers else link_worker(worker_idx),
                f"{lease.cause} L{lease.key.layer_idx} E{lease.key.expert_idx}",
                start_s,
                time.perf_counter(),
                cause=lease.cause,
                layer=lease.key.layer_idx,
                expert=lease.key.expert_idx,
                chunk=lease.chunk_idx,
                nbytes=sum(chunk.nbytes for chunk in chunks),
            )

    def copy_demand(self) -> None:
        """Fetch in this thread what is demanded now. A failure is published, for the visit to raise."""
        if self.queues:
            self._queue_demand()
        else:
            self._copy_one_by_one()

    def _queue_demand(self) -> None:
        orders: list[Lease] = []
        try:
            with self.lock, Changing(self):
                if self._may_order:
                    orders = self.scheduler.next_demand()
            if orders:
                self._publish(orders, self._transfer_all(orders))
        except BaseException:
            if orders:  # put in again: others may need them, too
                self._publish(orders, self._again(partial(self._transfer_all, orders)))
            raise

    def _publish(self, orders: list[Lease], error: Exception | None) -> None:
        """Publish the completion of all `orders`."""
        with self.lock, Changing(self):
            while orders and not self.torn:
                self._completed(orders.pop(), error)
            if any(visit.may_go_on() for visit in self.waiting_visits):
                self.notify_visits()

    def _transfer_all(self, orders: Sequence[Lease]) -> Exception | None:
        start_s = time.perf_counter()
        transfers: list[tuple[Chunk, Any]] = []
        for lease in orders:
            slot = self.pool_of[lease.key.layer_idx].slot(lease.slot)
            chunks = self.store.chunks(lease.key)[lease.chunk_idx : lease.chunk_idx + lease.num_chunks]
            transfers += [(chunk, slot) for chunk in chunks]
        try:
            self.link.transfer_all(transfers)
        except Exception as error:
            return error
        for lease in orders if self.tracer is not None else ():
            self._trace(lease, self.link.workers, start_s)
        return None

    def _copy_one_by_one(self) -> None:
        orders: list[Lease] = []
        try:
            with self.lock, Changing(self):
                self._take_order(orders, speculate=False)
            while orders:
                self._complete(orders, self._transfer(orders[0], self.link.workers), speculate=False)
        except BaseException:
            if orders:  # a short copy is made again: others may need it, too, and whatever else is demanded
                self._complete(
                    orders, self._again(partial(self._transfer, orders[0], self.link.workers)), goes_on=False
                )
            raise

    @staticmethod
    def _again(transfer: Callable[[], Exception | None]) -> Exception | None:
        try:
            return transfer()
        except BaseException as interruption:
            return EngineError(f"The copy was interrupted by {interruption!r}.")

    def _complete(
        self, orders: list[Lease], error: Exception | None, speculate: bool = True, goes_on: bool = True
    ) -> None:
        """Publish the completion of the only one of `orders`, and put the next in its place in the same breath, if it
        `goes_on`."""
        first_failure = False
        with self.lock, Changing(self):
            lease = orders.pop()
            if self.torn:
                return
            first_failure = self._completed(lease, error)
            if error is None and any(visit.may_go_on() for visit in self.waiting_visits):
                self.notify_visits()
            if goes_on:
                self._take_order(orders, speculate)
            if speculate:
                self.wake_workers()  # where there is one order there may be more
            if not orders and any(visit.may_go_on() for visit in self.waiting_visits):
                self.notify_visits()  # nothing is left to warm the cache with
        if first_failure and lease.cause == "prefetch":
            # As text: an error that a log keeps would keep the slots that its traceback knows.
            logger.warning("prefetch of %s failed, it will be fetched on demand: %s", lease.key, str(error))

    def _completed(self, lease: Lease, error: Exception | None) -> bool:
        """A transfer is over, with the lock held; says whether its expert failed for the first time since it last arrived."""
        self.progress += 1
        self._chunks_completed += 1
        if error is not None:
            return self._failed(lease, error)
        if self.scheduler.chunk_done(lease):
            self._load_errors.pop(lease.key, None)
        return False

    def _failed(self, lease: Lease, error: Exception) -> bool:
        """Publish a failure, with the lock held; says whether it is the expert's first since it last arrived."""
        first = lease.key not in self._load_errors
        self._load_errors[lease.key] = (lease, without_frames(error))
        self.scheduler.chunk_failed(lease)
        self.notify_visits()
        return first


def _once() -> int:
    return 1


class _InterruptsChangeError(PatchStateError):
    """Raised where a signal handler would change what it interrupted a change of."""


class Changing:
    """A change of the scheduler's state, with the lock held: what an exception in its midst leaves cannot be trusted.

    Not a generator, which takes several times as long: this is on the path of every layer.

    Raises:
        PatchStateError: this thread is in the midst of one: a signal handler, or a finalizer, calls.
    """

    __slots__ = ("_monitor",)

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        if self._monitor.times_held() > 1:
            raise _InterruptsChangeError(
                "A signal handler (or a finalizer) used the model while it interrupted the same thread in the midst of a "
                "change of the cache. Let the handler set a flag, and look at that in the main program."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._monitor.break_off(error)
