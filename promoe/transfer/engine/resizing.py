"""Resizing the slot pools of an open model."""

from __future__ import annotations

from collections.abc import Sequence

from promoe.errors import PatchStateError
from promoe.transfer.engine.monitor import Changing
from promoe.transfer.engine.transfers import Transfers
from promoe.transfer.engine.waiter import Waiter


class Resizing(Waiter):
    """Waits until the chunks in flight have landed, sends nothing meanwhile, and then resizes the pools.

    Args:
        engine: started.
        num_slots: of each pool.
    """

    def __init__(self, engine: Transfers, num_slots: Sequence[int]) -> None:
        super().__init__(engine)
        self._num_slots = num_slots

    def run(self) -> None:
        """Return when the pools have their new sizes. What stays in a slot keeps its weights.

        Raises:
            PatchStateError: a forward is using experts; nothing was changed.
            ConfigError: there is not enough memory; nothing was changed.
            EngineClosedError, EngineStalledError, EngineError: nothing is served any more.
        """
        engine = self._engine
        try:
            with engine.lock:
                engine.check_alive()
                if engine.paused_by is not None:
                    raise PatchStateError(
                        "The cache is being resized by another thread already. Wait until it is done."
                    )
                engine.paused_by = self
            self._wait_for(self._resized)
        finally:
            with engine.lock:
                if engine.paused_by is self:
                    engine.paused_by = None
                    if not engine.torn:
                        with Changing(engine):
                            engine.wake_workers()

    def may_go_on(self) -> bool:
        """Return whether nothing is in flight, with the engine's lock held."""
        return self._engine.scheduler.is_still

    def _who(self) -> str:
        return "The cache is being resized"

    def _resized(self) -> bool | None:
        """Resize the pools once nothing is in flight."""
        engine, scheduler = self._engine, self._engine.scheduler
        if not self.may_go_on():
            return None
        if scheduler.is_used or any(waiter is not self for waiter in engine.waiters):
            raise PatchStateError(
                "The cache cannot be resized while a forward of the model uses it, or while it is being warmed. Nothing was "
                "changed. Call resize between two forwards, for example in a stopping criterion."
            )
        # All memory is allocated before anything is changed: that may fail.
        rooms = [
            (idx, pool, num_slots, pool.room_for(num_slots))
            for idx, (pool, num_slots) in enumerate(zip(engine.pools, self._num_slots, strict=True))
            if num_slots != pool.num_slots
        ]
        with Changing(engine):
            engine.renewable = False  # until slots and scheduler agree again
            for idx, pool, num_slots, room in rooms:
                kept = scheduler.prepare_resize(idx, num_slots)
                pool.resize(num_slots, kept, room)
                scheduler.resize(idx, num_slots, kept)
            engine.renewable = True
        return True
