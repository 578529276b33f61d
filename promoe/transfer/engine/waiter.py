"""Waiting for what link workers bring about: by forwards, and by who warms or resizes the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from promoe.transfer.engine.transfers import Transfers

# How often a waiter that nobody notifies looks whether anything moved at all.
HEARTBEAT_S = 1.0
# One wait counts no more than this, on a machine too busy to wake the waiter in time.
LONGEST_WAIT_S = 2 * HEARTBEAT_S

Found = TypeVar("Found")


class Waiter:
    """Somebody who waits for an engine, as one of its `waiters`.

    Args:
        engine: whose workers move chunks.
    """

    def __init__(self, engine: Transfers) -> None:
        self._engine = engine
        self._notified = threading.Lock()  # held while there is nothing to look at

    def may_go_on(self) -> bool:
        """Return whether the wait is over. Asked with the engine's lock held."""
        raise NotImplementedError

    def _who(self) -> str:
        """Return who waits for what, for an error."""
        raise NotImplementedError

    def notify(self) -> None:
        """Let it look at once, with the engine's lock held."""
        if self._notified.locked():
            self._notified.release()

    def _wait_for(self, look: Callable[[], Found | None]) -> Found:
        """Return what `look` finds. While it finds None, wait to be notified. It is called with the engine's lock held.

        This does not wait on a condition of the engine's lock: Ctrl-C while a condition takes the lock again would
        leave without it.

        Raises:
            EngineClosedError, EngineStalledError, EngineError: nothing will come any more.
        """
        engine = self._engine
        last_look_s, waited_s, progress = engine.clock(), 0.0, -1
        try:
            while True:
                with engine.lock:
                    engine.check_alive()
                    if (found := look()) is not None:
                        return found
                    self._notified.acquire(blocking=False)  # `look` has seen what came before
                    if self not in engine.waiters:
                        engine.waiters.append(self)
                    now_s = engine.clock()
                    # No more than it meant to sleep: a process that was stopped (Ctrl-Z, a frozen container) did not wait.
                    waited_s += min(now_s - last_look_s, LONGEST_WAIT_S)
                    last_look_s = now_s
                    if engine.progress != progress:
                        progress, waited_s = engine.progress, 0.0
                    elif waited_s > engine.stall_timeout_s:
                        raise engine.stalled(self._who(), waited_s)
                self._notified.acquire(timeout=min(HEARTBEAT_S, engine.stall_timeout_s))
        finally:
            with engine.lock:
                if self in engine.waiters:
                    engine.waiters.remove(self)
