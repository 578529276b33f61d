"""Runs a predictor beside the model: one thread, never on the critical path."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from promoe.engine import Engine
from promoe.predictors import LayerVisit, Predictor
from promoe.tracing import PREDICTOR

logger = logging.getLogger(__name__)

# Visits that may wait; older ones are dropped, because their forecasts would come too late.
MAX_WAITING = 2


class PredictionThread:
    """Feeds layer visits to a predictor and its forecasts to the engine.

    A predictor that raises is switched off with one warning: a prediction must never break a forward.
    """

    def __init__(self, predictor: Predictor, engine: Engine, in_order: bool = False) -> None:
        self._predictor = predictor
        self._engine = engine
        # The oracle counts visits and must see each of them.
        self._waiting: deque[tuple[int, LayerVisit]] = deque(maxlen=None if in_order else MAX_WAITING)
        self._condition = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="promoe-predictor", daemon=True)
        self._thread.start()

    def post(self, origin_step: int, visit: LayerVisit) -> None:
        """Predict from this visit, which will be the scheduler's step `origin_step`, as soon as possible."""
        with self._condition:
            self._waiting.append((origin_step, visit))
            self._condition.notify()

    def drain(self) -> None:
        """Wait until everything posted was predicted (tests and replays)."""
        with self._condition:
            while (self._waiting or self._busy) and not self._closed:
                self._condition.wait(0.05)

    def close(self) -> None:
        """Stop after the prediction under way. Safe to repeat."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not self._waiting and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                origin_step, visit = self._waiting.popleft()
                self._busy = True
            try:
                self._predict(origin_step, visit)
            except Exception:
                logger.exception("The predictor failed and is switched off; experts are fetched on demand from now on.")
                with self._condition:
                    self._closed = True
                    self._busy = False
                    self._condition.notify_all()
                return

    def _predict(self, origin_step: int, visit: LayerVisit) -> None:
        engine = self._engine
        start_s = time.perf_counter()
        forecasts = self._predictor.predict(visit)
        end_s = time.perf_counter()
        for forecast in forecasts:
            engine.forecast(origin_step, forecast.steps_ahead, forecast.layer_idx, forecast.probabilities)
        with engine.lock:
            engine.recorder.predictor_time(end_s - start_s)
        if (tracer := engine.tracer) is not None:
            tracer.span(PREDICTOR, f"predict from L{visit.layer_idx}", start_s, end_s, forecasts=len(forecasts))
