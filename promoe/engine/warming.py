"""Filling free slots before they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from promoe.engine.monitor import Changing, Monitor
from promoe.engine.waiter import Waiter
from promoe.scheduler import ExpertKey

logger = logging.getLogger(__name__)


class Warming(Waiter):
    """Fetches experts into slots that are free, and waits for them. Forwards may run meanwhile: theirs go first.

    Args:
        engine: started.
        keys: what to fetch, best first.
        rates: how often each layer's experts are used, see `Scheduler.start_from`.
    """

    def __init__(self, engine: Monitor, keys: Sequence[ExpertKey], rates: Sequence[Sequence[float]]) -> None:
        super().__init__(engine, "The cache is being warmed")
        self._keys = keys
        self._rates = rates

    def run(self) -> int:
        """Return once nothing more will come; says how many of the experts are there.

        Raises:
            EngineClosedError, EngineStalledError, EngineError: nothing is served any more.
        """
        engine = self._engine
        try:
            with engine.lock:
                engine.check_alive()
                with Changing(engine):
                    engine.scheduler.start_from(self._rates)
                    engine.scheduler.warm(self._keys)
                    engine.waiting_visits.append(self)
                    engine.wake_workers()
            self._wait()
            with engine.lock:
                found = sum(engine.scheduler.is_resident(*key) for key in self._keys)
                failed = engine.failed_experts(self._keys)
        finally:
            with engine.lock:
                self._leave()
                if not engine.torn:
                    engine.scheduler.warm(())
        for key, error in list(failed.items())[:1]:
            # As text: an error that a log keeps would keep the slots that its traceback knows.
            logger.warning(
                "%d experts could not be fetched to warm the cache, and will be fetched on demand. %s: %s",
                len(failed),
                key,
                str(error),
            )
        return found

    def may_go_on(self) -> bool:
        """Whether it is over, with the engine's lock held."""
        return not self._engine.scheduler.warming
