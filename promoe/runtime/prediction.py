"""Run a predictor for a model: in a thread of its own, or in the forward if it is quick and no core is free.

Who predicts depends on the cores. Beside a model, one prediction takes 0.15 to 0.32 ms (docs/benchmarks.md, Predictors),
about twice as long as alone: the model's products leave nothing of it in the processor's caches. If a core is free, a
thread makes the prediction. It begins when the forward multiplies or waits, and so does not need the interpreter. If no
core is free, handing the prediction over would cost as much as making it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from functools import partial

import numpy as np
import numpy.typing as npt

from promoe.errors import ConfigError
from promoe.experts.moe_layers import ModelGoneError
from promoe.predictors import LayerVisit, Predictor, ReuseForecast, Traits
from promoe.scheduler.many_tokens import of_all
from promoe.stats.tracing import PREDICTOR
from promoe.transfer.devices import Device, Event
from promoe.transfer.engine import Engine
from promoe.transfer.lifetimes import when_gone
from promoe.transfer.threads import ThreadBeside, has_spare_core, hold_in_forks, stop_at_exit

logger = logging.getLogger(__name__)

# Number of visits that may wait. Older ones are dropped, because their forecasts would come too late.
MAX_WAITING = 2
# The scheduler's step of a layer visit, the visit, and the event after which the device has computed its tensors.
Order = tuple[int, LayerVisit, Event | None]


class Forecaster:
    """Passes layer visits to a predictor, and its forecasts to the engine.

    The predictor runs in a thread of its own, off the critical path. There is one exception: if the predictor says that
    it is `quick` and the model computes on every core, it runs in the forward, because handing the visit to a thread
    would take longer than the prediction. On a device, the predictor always runs in the thread and its kernels go into
    a queue of their own, because somebody has to wait for the result. If a predictor raises, that is logged once and
    the predictor is switched off: a prediction must never break a forward.

    Args:
        predictor: the predictor.
        engine: receives the forecasts.
        device: the device that the model computes on; None: the CPU.
    """

    def __init__(self, predictor: Predictor, engine: Engine, device: Device | None = None) -> None:
        self._predictor = predictor
        self._engine = engine
        traits = Traits.of(predictor)
        self._needs_every_visit = traits.needs_every_visit
        self._foresees_reuse = traits.foresees_reuse and engine.scheduler.config.eviction == "next_use"
        self._device = device
        self._queue = None if device is None else device.side_queue()
        self._waiting: deque[Order] = deque(maxlen=None if traits.needs_every_visit else MAX_WAITING)
        self._condition = threading.Condition()
        self._one_at_a_time = threading.RLock()  # a signal handler may run the model, too
        self._closed = False
        self._busy = False
        self.failed = False
        """The predictor raised an error or returned something invalid."""
        hold_in_forks(self, self._condition, Forecaster._forked)
        self._thread: ThreadBeside | None = None  # None: the predictor runs in the forward
        if traits.needs_every_visit or device is not None or not traits.quick or has_spare_core():
            # A predictor refers to gates, which refer to the whole model. A waiting thread must not keep that alive.
            run = partial(_run, weakref.ref(self), self._condition, self._waiting)
            self._thread = ThreadBeside(run, "promoe-predictor")
            self._thread.start()
            stop_at_exit(self, Forecaster._stop)
            self._call_off_waking = when_gone(self, partial(_wake, self._condition))

    @property
    def of_use(self) -> bool:
        """Whether a prediction made now could have any effect. If not, the forward need not spend time on it."""
        if self.failed or self._closed:
            return False
        scheduler = self._engine.scheduler
        wanted = self._foresees_reuse or scheduler.prefetch_on
        return self._needs_every_visit or (wanted and not scheduler.everything_resident)

    @property
    def in_forward(self) -> bool:
        """Whether `visit` predicts in the calling thread."""
        return self._thread is None

    def visit(self, origin_step: int, visit: LayerVisit) -> None:
        """Predict from this visit, which will be the scheduler's step `origin_step`: at once, or soon in the thread."""
        if self._thread is None:
            with self._one_at_a_time:
                if not self._closed:
                    self._attempt(origin_step, visit, None)
            return
        ready = None if self._device is None else self._device.current().mark()
        with self._condition:
            self._waiting.append((origin_step, visit, ready))
            self._condition.notify()

    def drain(self) -> None:
        """Wait until all waiting visits have been predicted from (for tests and replays)."""
        with self._condition:
            while (self._waiting or self._busy) and not self._closed:
                self._condition.wait(0.05)

    def close(self) -> None:
        """Stop after the running prediction. A prediction that does not end is left behind. Calling it again is safe."""
        self._stop()
        if self._engine.interrupted:
            return  # the predictor's thread may need the lock that this thread holds
        if self._thread is not None and self._thread is not threading.current_thread():
            self._call_off_waking()
            self._thread.join(min(self._engine.stall_timeout_s, threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                logger.warning("The predictor did not return within %.1f s; left behind.", self._engine.stall_timeout_s)

    def _stop(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _forked(self) -> None:
        """Close the forecaster in a forked process, which does not have the thread. The condition is held."""
        self._closed = True

    def _attempt(self, origin_step: int, visit: LayerVisit, ready: Event | None) -> None:
        try:
            self._predict(origin_step, visit, ready)
        except ModelGoneError:  # the model was freed while the thread predicted for it
            self._stop()
        except BaseException as error:
            if self._thread is None and isinstance(error, KeyboardInterrupt):
                raise  # the user interrupted the forward in which the predictor runs
            logger.exception("The predictor failed and is switched off; experts are fetched on demand from now on.")
            with self._condition:
                self._closed = self.failed = True
                self._busy = False
                self._condition.notify_all()
            self._engine.set_prefetch(False)

    def _predict(self, origin_step: int, visit: LayerVisit, ready: Event | None) -> None:
        engine = self._engine
        start_s = time.perf_counter()
        if self._queue is None:
            forecasts = self._predictor.predict(visit)
        else:
            if ready is not None:
                self._queue.wait(ready)
            with self._queue.running():
                forecasts = self._predictor.predict(visit)
        end_s = time.perf_counter()
        for forecast in forecasts:
            if isinstance(forecast, ReuseForecast):
                self._check(forecast.layer_idx, forecast.log_odds, "log odds")
                engine.foresee_reuse(origin_step, forecast.layer_idx, forecast.log_odds)
            # While prefetching is off, a predictor that foresees reuse still runs, only to improve eviction.
            elif not self._foresees_reuse or engine.scheduler.prefetch_on:
                self._check(forecast.layer_idx, forecast.probabilities, "probabilities")
                probabilities = forecast.probabilities
                if visit.all_tokens:
                    probabilities = of_all(np.asarray(probabilities), len(visit.chosen), visit.all_tokens)
                engine.forecast(origin_step, forecast.steps_ahead, forecast.layer_idx, probabilities)
        with engine.lock:
            engine.recorder.predictor_time(end_s - start_s)
        if (tracer := engine.tracer) is not None:
            tracer.span(PREDICTOR, f"predict from L{visit.layer_idx}", start_s, end_s, forecasts=len(forecasts))

    def _check(self, layer_idx: int, values: npt.ArrayLike, what: str) -> None:
        num_experts = self._engine.scheduler.config.num_experts
        if not 0 <= layer_idx < len(num_experts):
            raise ConfigError(
                f"The predictor forecast layer {layer_idx}, but the model has MoE layers 0 to {len(num_experts) - 1}."
            )
        shape, expected = np.shape(values), (num_experts[layer_idx],)
        if shape != expected:
            raise ConfigError(
                f"The predictor gave {what} of shape {shape} for layer {layer_idx}, which has {expected[0]} experts. "
                f"Give one number per expert, {expected}."
            )


def _run(found: weakref.ref[Forecaster], condition: threading.Condition, waiting: deque[Order]) -> None:
    """Run a forecaster's thread, until the forecaster is closed or freed."""
    while (work := _next(found, condition, waiting)) is not None:
        forecaster, order = work
        forecaster._attempt(*order)
        del work, forecaster, order


def _next(
    found: weakref.ref[Forecaster], condition: threading.Condition, waiting: deque[Order]
) -> tuple[Forecaster, Order] | None:
    with condition:
        while (forecaster := found()) is not None:
            forecaster._busy = False
            condition.notify_all()
            if forecaster._closed:
                break
            if waiting:
                forecaster._busy = True
                return forecaster, waiting.popleft()
            del forecaster
            condition.wait()
    return None


def _wake(condition: threading.Condition) -> None:
    with condition:
        condition.notify_all()
