"""Callbacks that do not keep an object alive, and one for when it is gone.

A patched model owns its runtime. Nothing that the runtime holds may own the model in turn: then only a garbage
collection would free the model, with its weights, slots, threads and files.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner", bound=object)


def if_alive(owner: Owner, action: Callable[..., object]) -> Callable[..., None]:
    """Return a callback that calls `action(owner, ...)`, or does nothing once `owner` is gone. `action` must not hold it."""
    found = weakref.ref(owner)

    def call(*args: Any) -> None:
        if (still_there := found()) is not None:
            action(still_there, *args)

    return call


def without_frames(error: BaseException) -> BaseException:
    """Return an exception of the same class and message, with its causes, but without stack frames.

    Keep this one: the frames of a raised exception hold the objects of all callers, and so the model.
    """
    try:
        kept = copy.copy(error)
    except Exception:  # an exception that cannot be made from its arguments alone
        kept = RuntimeError(repr(error))
    kept.__traceback__ = kept.__context__ = None
    kept.__cause__ = None if error.__cause__ is None else without_frames(error.__cause__)
    return kept


def when_gone(owner: object, close: Callable[[], None]) -> Callable[[], object]:
    """Call `close` once `owner` is gone, but not when the process ends. Return a function that cancels this.

    A thread calls it: an object may go at any time, also where a lock is held that `close` takes.
    """
    finalizer = weakref.finalize(owner, threading.Thread(target=close, name="promoe-close", daemon=True).start)
    finalizer.atexit = False
    return finalizer.detach
