"""Waiting for what link workers bring about."""

from __future__ import annotations

import threading

from promoe.engine.monitor import HEARTBEAT_S, Monitor


class Waiter:
    """Who waits for something of an engine that is no layer's visit.

    Args:
        engine: whose workers move chunks.
        what: is under way, for an error.
    """

    def __init__(self, engine: Monitor, what: str) -> None:
        self._engine = engine
        self._what = what
        self._notified = threading.Lock()  # held while there is nothing to look at

    def may_go_on(self) -> bool:
        """Whether it is over, with the engine's lock held."""
        raise NotImplementedError

    def notify(self) -> None:
        """Let it look at once, with the engine's lock held."""
        if self._notified.locked():
            self._notified.release()

    def _wait(self) -> None:
        """Return once it may go on; it is one of the engine's `waiting_visits`.

        Raises:
            EngineClosedError, EngineStalledError, EngineError: nothing will come any more.
        """
        engine = self._engine
        progress, moved_s = -1, engine.clock()
        while True:
            with engine.lock:
                engine.check_alive()
                if self.may_go_on():
                    return
                now_s = engine.clock()
                if engine.progress != progress:
                    progress, moved_s = engine.progress, now_s
                elif now_s - moved_s > engine.stall_timeout_s:
                    raise engine.stalled(self._what, now_s - moved_s)
                self._notified.acquire(blocking=False)  # what came before has been looked at
            self._notified.acquire(timeout=min(HEARTBEAT_S, engine.stall_timeout_s))

    def _leave(self) -> None:
        """It does not wait any more, with the engine's lock held."""
        if self in self._engine.waiting_visits:
            self._engine.waiting_visits.remove(self)
