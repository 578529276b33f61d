"""The scheduler's orders carried out: by link workers, or by the forward that needs an expert."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from promoe.errors import EngineError
from promoe.scheduler import Lease
from promoe.stats.tracing import LINK_IN_FORWARD, link_worker
from promoe.stores.base import Chunk
from promoe.transfer.engine.monitor import Changing, Monitor
from promoe.transfer.lifetimes import without_frames

logger = logging.getLogger(__name__)


class Transfers(Monitor):
    """A monitor that has its scheduler's orders carried out."""

    def wake_workers(self) -> None:
        """Hand orders to idle workers, with the lock held.

        The order is taken here and not by the worker: until the worker gets the interpreter, hundreds of microseconds
        pass in which the link could have been busy.
        """
        while self._idle_workers and (leases := self._next_order()):
            self._assigned += leases
            self._idle_workers -= 1
            self._work.notify()

    def copy_demand(self) -> None:
        """Fetch in this thread what is demanded now. A failure is published, and the visit raises it."""
        orders: list[Lease] = []
        try:
            with self.lock, Changing(self):
                if self.queues:
                    orders = self.scheduler.next_demand() if self._may_order else []
                else:
                    orders = self._next_order(speculate=False)
            while orders:
                # The error must not stay in a local variable: its frames refer to this one, and to the model.
                self._complete(
                    orders,
                    self._queue(orders) if self.queues else self._transfer(orders[0], self.link.workers),
                    speculate=False,
                    goes_on=not self.queues,
                )
        except BaseException:
            if orders:  # made once more, since others may need it, too; workers do what else is demanded
                self._complete(orders, self._once_more(orders), goes_on=False)
            raise

    @property
    def _may_order(self) -> bool:
        """Whether there is something to move, and nothing forbids to move it."""
        stopped = self._closed or self._ending or self._broken is not None or self.paused_by is not None
        return not stopped and self.scheduler.has_orders

    def _next_order(self, speculate: bool = True) -> list[Lease]:
        """Take the scheduler's next order, with the lock held. The list is empty if there is none."""
        return self.scheduler.next_chunks(1, speculate) if self._may_order else []

    def _transfer(self, lease: Lease, worker_idx: int) -> Exception | None:
        """Move one chunk. Return the error if that failed."""
        pool = self.pool_of[lease.code]
        chunk = self.store.chunks(lease.key)[lease.chunk_idx]
        start_s = time.perf_counter()
        try:
            self.link.transfer(chunk, pool.slot(lease.slot), pool.address(lease.slot))
        except Exception as error:  # whatever a link raises is reported to the forward that needs the expert
            return error
        self._trace(lease, worker_idx, start_s)
        return None

    def _queue(self, orders: Sequence[Lease]) -> Exception | None:
        """Queue the copies of all chunks of all `orders` as one batch. Return the error if that failed."""
        start_s = time.perf_counter()
        transfers: list[tuple[Chunk, Any]] = []
        for lease in orders:
            slot = self.pool_of[lease.code].slot(lease.slot)
            chunks = self.store.chunks(lease.key)[lease.chunk_idx : lease.chunk_idx + lease.num_chunks]
            transfers += [(chunk, slot) for chunk in chunks]
        try:
            self.link.transfer_all(transfers)
        except Exception as error:
            return error
        for lease in orders if self.tracer is not None else ():
            self._trace(lease, self.link.workers, start_s)
        return None

    def _once_more(self, orders: Sequence[Lease]) -> Exception | None:
        """Make an interrupted transfer again. Return the error if that failed or was interrupted, too."""
        try:
            return self._queue(orders) if self.queues else self._transfer(orders[0], self.link.workers)
        except BaseException as interruption:
            return EngineError(f"The copy was interrupted by {interruption!r}.")

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

    def _complete(
        self, orders: list[Lease], error: Exception | None, speculate: bool = True, goes_on: bool = True
    ) -> None:
        """Publish that the transfers of all `orders` are over, and put the next order in their place.

        Both happen under one lock, so that the link is not idle in between.

        Args:
            orders: what was moved; afterwards what to move next, or nothing.
            error: why the transfers failed, if they did.
            speculate: whether the next order may be speculative; then idle workers are woken, too.
            goes_on: whether this thread takes another order.
        """
        failed_prefetch: Lease | None = None
        with self.lock, Changing(self):
            if self.torn:
                orders.clear()
                return
            while orders:
                lease = orders.pop()
                if self._completed(lease, error) and lease.cause == "prefetch":
                    failed_prefetch = lease
            if goes_on:
                orders += self._next_order(speculate)
            if speculate:
                self.wake_workers()  # where there is one order there may be more
            # After the orders: a waiter that warms the cache goes on when nothing is left to order.
            if any(waiter.may_go_on() for waiter in self.waiters):
                self.notify_waiters()
        if failed_prefetch is not None:
            # As text: an error that a log keeps would keep the slots that its traceback knows.
            logger.warning("prefetch of %s failed, it will be fetched on demand: %s", failed_prefetch.key, str(error))

    def _completed(self, lease: Lease, error: Exception | None) -> bool:
        """Publish that one transfer is over, with the lock held.

        Returns:
            Whether it failed, for the first time since its expert last arrived.
        """
        self.progress += 1
        self._chunks_completed += 1
        if error is None:
            if self.scheduler.chunk_done(lease):
                self._load_errors.pop(lease.key, None)
            return False
        is_first = lease.key not in self._load_errors
        self._load_errors[lease.key] = (lease, without_frames(error))
        self.scheduler.chunk_failed(lease)
        self.notify_waiters()
        return is_first
