"""The transfer engine: threads that move chunks as the scheduler orders, and forwards that wait for them.

It knows links, slots and errors. It does not know models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from promoe.scheduler import ExpertKey, Lease, Scheduler
from promoe.stats.counts import Phase
from promoe.transfer.engine.monitor import Changing
from promoe.transfer.engine.resizing import Resizing
from promoe.transfer.engine.transfers import Transfers
from promoe.transfer.engine.visit import EngineVisit
from promoe.transfer.engine.warming import Warming
from promoe.transfer.memory import SlotPool
from promoe.transfer.threads import ThreadBeside, hold_in_forks, stop_at_exit

logger = logging.getLogger(__name__)

# How often `renew` looks whether all workers wait.
RENEWAL_LOOKS_S = 0.001


class Engine(Transfers):
    """Serves expert weights from a store into slots, by a scheduler's orders.

    `start` starts it and `close` ends it. `Monitor` describes the arguments.
    """

    _threads: Sequence[ThreadBeside] = ()

    def start(self) -> None:
        """Start the link workers."""
        if self.scheduler.config.strict:
            self._poison_released_slots()
        hold_in_forks(self, self.lock, Engine._forked)
        stop_at_exit(self, Engine._end)
        workers = range(self.link.workers)
        self._threads = [ThreadBeside(partial(self._serve, idx), f"promoe-link-{idx}") for idx in workers]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop the workers, once the chunks in flight have landed, and wake all who wait. Safe to repeat.

        A worker whose transfer does not return within `stall_timeout_s` is left behind: its source hangs, and waiting
        would hang, too. The memory of its slot lives as long as that worker. A signal handler that has interrupted this
        thread where it holds the lock waits for no worker: they need the lock to end.
        """
        interrupts = self.interrupted
        with self.lock:
            self._closed = True
            self._work.notify_all()
            self.notify_waiters()
        if interrupts:
            return
        # `join` takes no infinite timeout, which stands for no limit.
        deadline_s = time.perf_counter() + min(self.stall_timeout_s, threading.TIMEOUT_MAX)
        workers = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in workers:
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - time.perf_counter()))
        if stuck := [thread.name for thread in workers if thread.is_alive()]:
            logger.warning("%s still in a transfer after %.1f s; left behind.", ", ".join(stuck), self.stall_timeout_s)
        self.link.close()

    def renew(self) -> None:
        """Go on with another scheduler and nothing in the slots, after an exception came in the midst of a change.

        Call it while no forward uses a slot. What was learned while running is learned anew. Where renewing is not
        possible (a worker died or does not come back, the slots were being resized) nothing is changed, and
        `check_alive` still raises what happened.
        """
        deadline_s = time.perf_counter() + self.stall_timeout_s
        while time.perf_counter() < deadline_s:
            with self.lock:
                if not self.torn or not self.renewable or self._closed:
                    return
                if not all(thread.is_alive() for thread in self._threads):
                    return
                if not self._working:
                    self._replace_scheduler()
                    return
            time.sleep(RENEWAL_LOOKS_S)

    def _replace_scheduler(self) -> None:
        """Replace the scheduler, with the lock held. As the last step, the engine serves again."""
        before = self.scheduler
        self._assigned.clear()
        sizes = zip(before.config.pools, self.pools, strict=True)
        pools = [replace(spec, num_slots=pool.num_slots) for spec, pool in sizes]
        self.scheduler = Scheduler(replace(before.config, pools=pools), self.recorder, before.reuse)
        self.scheduler.prefetch_on = before.prefetch_on
        if before.config.strict:
            self._poison_released_slots()
        self.waiters.clear()
        self._load_errors.clear()
        self.paused_by, self._idle_workers = None, self.link.workers
        self._broken, self.torn = None, False

    def _end(self) -> None:
        """Begin nothing any more: the process ends. Forwards of daemon threads wait silently for their end."""
        with self.lock:
            self._ending = True
            self._work.notify_all()

    def _forked(self) -> None:
        """Stop serving in a new process, which has a copy of everything but the threads; with the lock held."""
        self.scheduler.prefetch_on = False  # the predictor's thread, which would be given visits, is not there either
        self._broken, self.renewable = None, False
        self._stop_serving(
            "This process was forked from the one that patched the model, whose link workers it lacks.", None
        )

    def _poison_released_slots(self) -> None:
        """Let every slot in RAM hold NaN while it has no expert, so that reading one shows."""
        for cache, pool in zip(self.scheduler.caches, self.pools, strict=True):
            if isinstance(pool, SlotPool):
                pool.poison()
                cache.on_release = pool.poison_slot

    # -- what forwards call ---------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """Start to fetch what is missing of the experts that a gate chose. Return how many are resident."""
        with self.lock:
            if self.torn:
                return 0  # the visit will raise
            with Changing(self):
                hits = self.scheduler.hint(layer_idx, ids)
                if hits < len(ids) and not self.forwards_copy:
                    self.wake_workers()
        if hits < len(ids) and self.queues:
            self.copy_demand()
        return hits

    def visit(
        self,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        num_sequences: int = 1,
        hits: int | None = None,
        phase: Phase | None = None,
    ) -> EngineVisit:
        """Begin a layer's visit (see `Scheduler.begin_visit`); use it as a context manager.

        Args:
            layer_idx: the MoE layer.
            ids: distinct experts that its tokens use.
            tokens: experts of each real token, for the reuse prior.
            num_sequences: tokens expected at the layer's next visit.
            hits: how many were resident at gate time, if a hint for these ids was given; for the counters.
            phase: of the pass, for the counters; None: that of the pass that began last.
        """
        return EngineVisit(self, layer_idx, ids, tokens, num_sequences, hits, phase)

    def forecast(self, origin_step: int, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> bool:
        """Hand a forecast to the scheduler, unless its layer's turn has come meanwhile. Return whether it was in time.

        Args:
            origin_step: scheduler step of the visit that the forecast was made from.
            steps_ahead: layer visits from that one to the one forecast.
            layer_idx: the layer forecast.
            probabilities: `[num_experts]`.
        """
        p_next = np.asarray(probabilities, dtype=np.float64)  # before the change: what cannot be converted raises here
        with self.lock:
            remaining = steps_ahead - max(0, self.scheduler.step - origin_step)
            made_before_renewal = origin_step > self.scheduler.step + 1
            if remaining <= 0 or made_before_renewal or self._closed or self.torn:
                return False
            with Changing(self):
                self.scheduler.forecast(remaining, layer_idx, p_next)
                self.wake_workers()
        return True

    def foresee_reuse(self, origin_step: int, layer_idx: int, log_odds: npt.ArrayLike) -> bool:
        """Hand the scheduler the odds that a layer's experts are used again, unless it was visited meanwhile.

        Args:
            origin_step: scheduler step of the visit that the odds were made from.
            layer_idx: the layer visited.
            log_odds: `[num_experts]`, as a predictor says them; see `Scheduler.foresee_reuse`.

        Returns:
            Whether it was in time.
        """
        odds = np.asarray(log_odds, dtype=np.float32)
        with self.lock:
            age = self.scheduler.step - origin_step
            if not -1 <= age < self.scheduler.config.num_layers or self._closed or self.torn:
                return False
            with Changing(self):
                self.scheduler.foresee_reuse(layer_idx, odds, begun=age >= 0)
        return True

    def stream(self, layer_idx: int) -> None:
        """Fetch a layer's absent experts in order: it is the next after the one just hinted, and needs nearly all."""
        with self.lock:
            if self.torn:
                return
            with Changing(self):
                self.scheduler.stream(2, layer_idx)  # the hint precedes its visit, which will be the next step
                self.wake_workers()

    def warm(self, keys: Sequence[ExpertKey], rates: Sequence[Sequence[float]]) -> int:
        """Fetch experts, best first, into free slots. Return how many of them are resident then (see `Warming`)."""
        return Warming(self, keys, rates).run()

    def resize(self, num_slots: Sequence[int]) -> None:
        """Resize each pool (see `Resizing.run` for errors)."""
        Resizing(self, num_slots).run()

    def set_prefetch(self, on: bool) -> None:
        """Switch prefetch on or off, also in the counters. Off withdraws what is forecast."""
        with self.lock:
            if on == self.scheduler.prefetch_on or self.torn:
                return
            with Changing(self):
                self.scheduler.prefetch_on = on
                self.recorder.prefetch_switched(on)
                if not on:
                    self.scheduler.withdraw_forecasts()

    # -- what link workers do -------------------------------------------------------------------------------------

    def _serve(self, worker_idx: int) -> None:
        try:
            while (lease := self._next_lease(worker_idx)) is not None:
                orders = [lease]
                while orders:
                    self._complete(orders, self._transfer(orders[0], worker_idx))
        except BaseException as error:
            logger.exception("link worker %d died", worker_idx)
            with self.lock:
                self.renewable = False
                self._stop_serving(f"A link worker died: {error!r}.", error)

    def _next_lease(self, worker_idx: int) -> Lease | None:
        """Wait for an order. None: the engine was closed, or the process ends."""
        with self.lock:
            self._working.discard(worker_idx)
            self._idle_workers += 1
            self.wake_workers()
            while not self._assigned:
                if self._closed or self._ending:
                    return None
                self._work.wait()
            self._working.add(worker_idx)
            return self._assigned.popleft()
