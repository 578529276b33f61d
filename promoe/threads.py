"""Threads that work beside a model's forwards, without taking its cores apart."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_beside(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread whose torch operations run on that thread alone.

    A thread that uses torch in parallel gets a team of OpenMP threads of its own. With two teams there are more threads
    than cores, upon which OpenMP puts idle ones to sleep at once instead of letting them look out for work, and waking
    them costs every operation of the *model* tens of microseconds: a quarter of a decode step on two cores.

    The number of threads that other threads use, present and future, is left as it is.
    """
    alone = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # or else this thread's first operation would ask for the number of all others
        torch.set_num_threads(1)
        alone.set()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    num_threads = torch.get_num_threads()
    thread.start()
    alone.wait()
    # `set_num_threads` counts for the calling thread, and for those that use torch for the first time afterwards.
    torch.set_num_threads(num_threads)
    return thread
