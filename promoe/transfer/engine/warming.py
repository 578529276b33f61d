"""Warming the cache: experts are fetched into free slots before a forward asks for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from promoe.scheduler import ExpertKey
from promoe.transfer.engine.monitor import Changing
from promoe.transfer.engine.transfers import Transfers
from promoe.transfer.engine.waiter import Waiter

logger = logging.getLogger(__name__)


class Warming(Waiter):
    """Fetches experts into free slots and waits for them. Forwards may run meanwhile: theirs go first.

    Args:
        engine: started.
        keys: what to fetch, best first.
        rates: how often each layer's experts are used; see `Scheduler.start_from`.
    """

    def __init__(self, engine: Transfers, keys: Sequence[ExpertKey], rates: Sequence[Sequence[float]]) -> None:
        super().__init__(engine)
        self._keys = keys
        self._rates = rates

    def run(self) -> int:
        """Return how many of the experts are in slots, once nothing more will come.

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
                    engine.wake_workers()
            num_resident, failed = self._wait_for(self._look)
        finally:
            with engine.lock:
                if not engine.torn:
                    engine.scheduler.warm(())
        if failed:
            key, error = next(iter(failed.items()))
            # As text: an error that a log keeps would keep the slots that its traceback knows.
            logger.warning(
                "%d experts could not be fetched to warm the cache, and will be fetched on demand. %s: %s",
                len(failed),
                key,
                str(error),
            )
        return num_resident

    def may_go_on(self) -> bool:
        """Return whether warming is over, with the engine's lock held."""
        return not self._engine.scheduler.warming

    def _look(self) -> tuple[int, dict[ExpertKey, BaseException]] | None:
        """Return how many experts are in slots and which failed, once warming is over."""
        if not self.may_go_on():
            return None
        engine = self._engine
        num_resident = sum(engine.scheduler.is_resident(*key) for key in self._keys)
        return num_resident, engine.failed_experts(self._keys)

    def _who(self) -> str:
        return "The cache is being warmed"
