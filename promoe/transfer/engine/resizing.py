"""Another number of slots while a model is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promoe.errors import PatchStateError
from promoe.transfer.engine.monitor import Changing, Monitor
from promoe.transfer.engine.waiter import Waiter


class Resizing(Waiter):
    """Lets what is in flight land, sends nothing meanwhile, and then has another number of slots.

    Args:
        engine: started.
        num_slots: of each pool.
    """

    def __init__(self, engine: Monitor, num_slots: Sequence[int]) -> None:
        super().__init__(engine)
        self._num_slots = num_slots

    def run(self) -> None:
        """Return when it is done.

        Raises:
            PatchStateError: a forward is using experts; then nothing was changed.
            ConfigError: there is no memory for that; then nothing was changed.
            EngineClosedError, EngineStalledError, EngineError: nothing is served any more.
        """
        engine = self._engine
        try:
            with engine.lock:
                engine.check_alive()
                if engine.held:
                    raise PatchStateError(
                        "The cache is being resized by another thread already. Wait until it is done."
                    )
                engine.held = self
            self._wait_for(self._resized)
        finally:
            with engine.lock:
                if engine.held is self:
                    engine.held = None
                    if not engine.torn:
                        with Changing(engine):
                            engine.wake_workers()

    def may_go_on(self) -> bool:
        """Whether nothing is in flight, with the engine's lock held."""
        return self._engine.scheduler.is_still

    def _what(self) -> str:
        return "The cache is being resized"

    def _resized(self) -> bool | None:
        """Do it, once nothing is in flight."""
        if not self.may_go_on():
            return None
        self._check_unused()
        sizes = enumerate(zip(self._engine.pools, self._num_slots, strict=True))
        rooms = {idx: pool.room_for(num_slots) for idx, (pool, num_slots) in sizes if num_slots != pool.num_slots}
        with Changing(self._engine):
            self._engine.renewable = False
            self._resize(rooms)
            self._engine.renewable = True
        return True

    def _check_unused(self) -> None:
        engine = self._engine
        if engine.scheduler.is_used or any(waiting is not self for waiting in engine.waiting_visits):
            raise PatchStateError(
                "The cache cannot be resized while a forward of the model uses it, or while it is being warmed. Nothing was "
                "changed. Call resize between two forwards, for example in a stopping criterion."
            )

    def _resize(self, rooms: Mapping[int, Any]) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        for idx, room in rooms.items():
            num_slots = self._num_slots[idx]
            kept = scheduler.prepare_resize(idx, num_slots)
            engine.pools[idx].resize(num_slots, kept, room)
            scheduler.resize(idx, num_slots, kept)
