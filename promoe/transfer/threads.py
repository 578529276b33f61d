"""Threads beside a model's forwards: they leave its compute threads alone, and survive a fork or the process's end."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch

from promoe.errors import ConfigError
from promoe.transfer.processor import cpu_quota, num_cores

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")
_warned: list[bool] = []
_HeldInForks = tuple[Any, AbstractContextManager[Any], Callable[[Any], None]]
_held_in_forks: dict[int, _HeldInForks] = {}  # a weak reference to the owner, its lock, what the new process calls
_forking: dict[int, list[_HeldInForks]] = {}  # by thread that forks: the owners themselves, and the locks that it holds
_numbers = itertools.count()
_stopped_at_exit: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
# How long the end of the process waits for what these threads are doing.
EXIT_WAIT_S = 2.0


class ThreadBeside(threading.Thread):
    """A daemon thread whose torch operations run on that thread alone.

    A thread that uses torch in parallel gets a team of OpenMP threads of its own. With two teams there are more threads
    than cores. Then OpenMP puts idle threads to sleep at once instead of letting them spin, and waking them costs every
    operation of the *model* tens of microseconds: a quarter of a decode step on two cores.

    Present and future threads other than this one use as many threads as before.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._alone = threading.Event()

    def start(self) -> None:
        """Start, and return once the thread computes alone."""
        num_threads = torch.get_num_threads()
        try:
            super().start()
            self._alone.wait()
        finally:
            # `set_num_threads` counts for the calling thread, and for threads that use torch first afterwards.
            torch.set_num_threads(num_threads)

    def run(self) -> None:
        """Call the target, with torch on this thread alone."""
        torch.get_num_threads()  # or this thread's first operation would take over the number of all others
        torch.set_num_threads(1)
        self._alone.set()
        super().run()


def has_spare_core() -> bool:
    """Return whether this process may use more cores than torch computes on."""
    return num_cores() > torch.get_num_threads()


def warn_of_threads() -> None:
    """Warn, once in a process, if torch computes on more threads than this process may keep cores busy."""
    threads, cores = torch.get_num_threads(), num_cores()
    if threads > cores and not _warned:
        _warned.append(True)
        quota = cpu_quota()
        why = (
            f"has {cores} core(s)" if quota is None else f"gets the time of {quota:.3g} cores (a control group's quota)"
        )
        logger.warning(
            "torch computes on %d threads, and this process %s: all threads wait for those without a core, and a token can "
            "take twice as long. Call torch.set_num_threads(%d) before opening the model, or set OMP_NUM_THREADS=%d.",
            threads,
            why,
            cores,
            cores,
        )


def check_interpreter() -> None:
    """Raise ConfigError if Python runs several threads at once (free-threaded builds). promoe was never tested there."""
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13
    if is_gil_enabled is not None and not is_gil_enabled():
        raise ConfigError(
            f"This is a free-threaded Python ({sys.version.split()[0]}) whose global interpreter lock is off. promoe's "
            "threads have only been tested with it. Start Python with PYTHON_GIL=1 or -X gil=1, or use another build."
        )


def hold_in_forks(owner: Owner, lock: AbstractContextManager[Any], in_child: Callable[[Owner], None]) -> None:
    """Take `lock` while the process forks, and call `in_child(owner)` in the new process before the lock is released there.

    A new process has the locks as they were, but none of the threads that would release them: without this it could
    wait for ever. `owner` is not kept alive.
    """
    number = next(_numbers)
    _held_in_forks[number] = (weakref.ref(owner, lambda _: _held_in_forks.pop(number, None)), lock, in_child)


def stop_at_exit(owner: Owner, stop: Callable[[Owner], None]) -> None:
    """Call `stop(owner)` when the process ends, after all threads but daemons have ended.

    `stop` tells threads of class `ThreadBeside` to end, and returns. A daemon that computes with torch while the
    interpreter is torn down would be ended in the midst of C++, which ends the process with SIGABRT. `owner` is not
    kept alive.
    """
    _stopped_at_exit[owner] = stop


@atexit.register
def _at_exit() -> None:
    for owner, stop in tuple(_stopped_at_exit.items()):
        stop(owner)
    deadline_s = time.perf_counter() + EXIT_WAIT_S
    for thread in threading.enumerate():
        if isinstance(thread, ThreadBeside):
            thread.join(max(0.0, deadline_s - time.perf_counter()))


def _before_fork() -> None:
    held = _forking[threading.get_ident()] = []
    for found, lock, in_child in tuple(_held_in_forks.values()):
        if (owner := found()) is not None:
            lock.__enter__()
            held.append((owner, lock, in_child))


def _after_fork(in_new_process: bool) -> None:
    for owner, lock, in_child in _forking.pop(threading.get_ident(), []):
        try:
            if in_new_process:
                in_child(owner)
        finally:
            lock.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=partial(_after_fork, False),
        after_in_child=partial(_after_fork, True),
    )
