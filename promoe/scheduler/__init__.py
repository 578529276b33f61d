"""Decides what is fetched when, and what makes room for it: a pure state machine.

It knows expert keys, slots, chunks, priorities and step numbers. It does not know torch, threads, clocks, files or
models. The threaded engine, the replay and the property tests drive the same code.
"""

from .config import ExpertKey, PoolSpec, SchedulerConfig
from .fetch_queue import Lease
from .scheduler import Scheduler
from .visit import Visit

__all__ = ["ExpertKey", "Lease", "PoolSpec", "Scheduler", "SchedulerConfig", "Visit"]
