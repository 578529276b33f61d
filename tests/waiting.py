"""Waiting for what other threads or processes will bring about: by looking, with a limit, never by hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from promoe.transfer.engine import Engine

WAIT_S = 120.0  # longer than anything takes on a slow machine: what takes longer hangs
_LOOK_EVERY_S = 0.0005


def until(condition: Callable[[], Any], found: Callable[[], str] = lambda: "nothing more is known") -> None:
    """Return once it holds.

    Args:
        condition: looked at again and again.
        found: what to say if it never does.
    """
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it never came: {found()}"
        time.sleep(_LOOK_EVERY_S)


def settle(engine: Engine) -> None:
    """Wait until no worker has anything to do: all wait, and none was woken that has not run yet.

    Also for what an ended forward had only announced, and what was only predicted.
    """

    def settled() -> bool:
        with engine.lock:
            return engine._idle_workers == engine.link.workers

    until(settled, engine.state)
