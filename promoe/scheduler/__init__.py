"""What is fetched when, and what makes room for it: a pure state machine.

Knows expert keys, slots, chunks, priorities and step numbers. Does not know torch, threads, clocks, files or models;
the threaded engine, the replay and the property tests drive the same code.
"""

from .config import PoolSpec, SchedulerConfig
from .keys import ExpertKey
from .scheduler import Lease, Scheduler
from .visit import Visit

__all__ = ["ExpertKey", "Lease", "PoolSpec", "Scheduler", "SchedulerConfig", "Visit"]
