"""The scheduler behind one lock: who may change it, who waits for it, and what stops it.

The lock is held for microseconds: never during I/O, copies, predictors or expert computation, and not while a forward
waits.

Ctrl-C may end a forward anywhere. What the forward had been granted or had begun is then given back. Only if Ctrl-C
comes while the scheduler's state is being changed, that state cannot be trusted any more. Then nothing is served until
the engine is renewed with another scheduler and nothing in the slots, by the next forward that begins while no other one
runs and no chunk is on its way. What was learned while running is learned anew. A visit of the old scheduler raises.

A signal handler runs in the thread that it interrupts, which may hold the lock. So a thread can take the lock again
that it holds, and a change that would begin during another change is refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

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
from promoe.stats.tracing import Tracer
from promoe.stores import Store, first_tensors, kinds, longest_chunk
from promoe.transfer.lifetimes import without_frames
from promoe.transfer.links import Link
from promoe.transfer.memory import Pool

if TYPE_CHECKING:
    from promoe.transfer.engine.waiter import Waiter


# The forward itself copies chunks of up to this size from RAM: two turns of other threads take longer.
SHORT_CHUNK_BYTES = 64 * 1024


class Monitor:
    """What forwards and link workers share. See `Engine`, which adds what they do with it.

    Args:
        scheduler: decides what moves. Only this engine drives it.
        store: knows the chunks of each expert.
        link: moves one chunk. `link.workers` threads call it. Every transfer looks it up, so a link over it (a
            `MeteredLink`, a `FaultyLink`) may take its place at any time.
        pools: one per pool of the scheduler, in its order.
        recorder: counts.
        stall_timeout_s: a forward that waits while no chunk completes for this long raises EngineStalledError.
        clock: returns seconds, by which that is measured.

    Attributes:
        lock: guards the scheduler, the recorder and everything here.
        times_held: returns how often the calling thread holds the lock: more than once where a signal handler, or a
            finalizer, interrupted it there.
        queues: whether `copy_demand` only queues copies for a device. Then it need not wait for the visit.
        forwards_copy: whether forwards fetch by `copy_demand` what they need. If not, workers do.
        pool_of: the pool of each expert, by the scheduler's codes.
        pools_of_layer: the pools of each layer's experts.
        first_names: per layer, the tensors that come with the first chunks (`SchedulerConfig.first_chunks`) of an ordinary
            expert, and of a hot one if there are any.
        waiters: forwards that wait for a chunk or for what another forward will give back, and who warms or resizes the
            cache.
        progress: counts completed transfers, and groups that forwards have run. A waiter looks whether it grows.
        paused_by: who wants nothing to be sent for now.
        torn: whether the scheduler's state cannot be trusted. It is not touched any more.
        renewable: whether the slots can be trusted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        link: Link,
        pools: Sequence[Pool],
        recorder: Recorder,
        stall_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.store = store
        self.link = link
        self.pools = tuple(pools)
        self.recorder = recorder
        self.stall_timeout_s = stall_timeout_s
        self.clock = clock
        self.tracer: Tracer | None = None
        # Python 3.10 does not say how often a lock is held. There, a signal handler that needs it waits for ever.
        self.lock: Any = threading.RLock() if hasattr(threading.RLock(), "_recursion_count") else threading.Lock()
        self.times_held: Callable[[], int] = getattr(self.lock, "_recursion_count", _once)
        assert len(pools) == len(scheduler.config.pools), (len(pools), scheduler.config.pools)
        self.pool_of = [self.pools[idx] for idx in scheduler.pool_idx_of]
        # A layer with experts of two kinds has two of them.
        self.pools_of_layer = [
            [pool for spec, pool in zip(scheduler.config.pools, pools, strict=True) if layer_idx in spec.layers]
            for layer_idx in range(scheduler.config.num_layers)
        ]
        self.first_names = [
            [first_tensors(store, key, scheduler.config.first_chunks_of(key)) for key in kinds(store, layer_idx)]
            for layer_idx in range(scheduler.config.num_layers)
        ]
        longest = longest_chunk(store)
        self.queues = link.queues
        self.forwards_copy = link.queues or (link.copies_from_ram and longest <= SHORT_CHUNK_BYTES)
        self.waiters: list[Waiter] = []
        self.progress = 0
        self.paused_by: Waiter | None = None
        self.torn = False
        self.renewable = True
        self._work = threading.Condition(self.lock)
        self._idle_workers = 0
        self._assigned: deque[Lease] = deque()  # to workers that were idle and have not taken them yet
        self._working = set(range(link.workers))  # those that do not wait for an order
        self._chunks_completed = 0
        self._closed = False
        self._ending = False  # the process
        self._broken: tuple[str, BaseException | None] | None = None  # why nothing is served any more, and the cause
        self._load_errors: dict[ExpertKey, tuple[Lease, BaseException]] = {}

    @property
    def interrupted(self) -> bool:
        """Whether the calling thread holds the lock: a signal handler or a finalizer runs, which interrupted it there."""
        owned: bool = getattr(self.lock, "_is_owned", bool)()
        return owned

    def check_alive(self) -> None:
        """Raise if nothing is served any more.

        Raises:
            EngineError: something broke, or this process was forked.
            EngineClosedError: the engine was closed.
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

    def _stop_serving(self, what: str, cause: BaseException | None) -> None:
        """Refuse to serve from now on, with the lock held. Later reasons are not remembered."""
        if self._broken is None:
            self._broken = (what, None if cause is None else without_frames(cause))
            self.notify_waiters()

    def change_failed(self, error: BaseException) -> None:
        """Stop serving where an exception left a change half done, with the lock held. Our own errors leave none."""
        if not isinstance(error, PromoeError) or isinstance(error, _InterruptsChangeError):
            self.torn = True
            self._stop_serving(f"Its state was being changed when this came: {error!r}.", error)

    def notify_waiters(self) -> None:
        """Let all waiters look again, with the lock held."""
        for waiter in self.waiters:
            waiter.notify()

    def load_error(self, layer_idx: int, expert_ids: Sequence[int]) -> ExpertLoadError:
        """Return the error to raise where these experts failed. It names the first, where it lies, and why it failed."""
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
        """Return those of `keys` whose latest fetch failed, and why; with the lock held."""
        return {key: self._load_errors[key][1] for key in keys if key in self._load_errors}

    def stalled(self, who: str, waited_s: float) -> EngineStalledError:
        """Return the error to raise where nothing has moved for too long, with the lock held."""
        return EngineStalledError(
            f"{who} and no chunk completed for {waited_s:.1f} s (stall_timeout_s={self.stall_timeout_s}). "
            f"State: {self.state()}. Check the disk, or raise stall_timeout_s."
        )

    def state(self) -> str:
        """Describe the engine's state for error messages."""
        scheduler = self.scheduler
        pools = "; ".join(
            f"pool {i}: {c.num_slots} slots, {c.num_free} free, {len(c.slot_of)} resident, {c.num_pinned} pinned, "
            f"{sum(load.in_flight for load in c.loads.values())} chunks in flight"
            for i, c in enumerate(scheduler.caches)
        )
        return (
            f"step {scheduler.step}, layer {scheduler.current_layer}, {self._chunks_completed} chunks completed, "
            f"{self._idle_workers} of {self.link.workers} workers idle, link: {self.link.describe()}; {pools}"
        )


def _once() -> int:
    return 1


class _InterruptsChangeError(PatchStateError):
    """Raised where a signal handler would change the state that it interrupted a change of."""


class Changing:
    """A change of the scheduler's state, with the lock held. An exception during it leaves a state that cannot be trusted.

    Not a generator, which takes several times as long: this is on the path of every layer.

    Raises:
        PatchStateError: this thread is changing the state already, and a signal handler or a finalizer has interrupted
            it.
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
            self._monitor.change_failed(error)
