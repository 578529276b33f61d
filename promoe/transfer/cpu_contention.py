"""How much of the cores others took meanwhile: other processes, and the host of a virtual machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from promoe.transfer.control_groups import PROC
from promoe.transfer.processor import usable_cores

# For the warning of `BusyCores` alone: commands that say at their end what others took leave it out.
busy_cores_logger = logging.getLogger("promoe.busy_cores")
# If others take this share of the cores that this process may use, its figures are not what the machine can do.
MUCH_TAKEN = 0.15
SAMPLE_S = 0.5
# A decoding model is watched for so many seconds at a time. If this part of a thread lacks a core, the user is told.
BUSY_STRETCH_S = 4.0
BUSY_THREADS = 0.5
# A shorter time says nothing: the system counts in ticks of 10 ms.
SHORTEST_S = 0.1
# The fields of a core's line in /proc/stat.
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class Taken:
    """How many of the cores that this process may use were taken, on average over some time.

    Attributes:
        cores: how many there are.
        by_others: how many of them other processes kept busy.
        withheld: how many a virtual machine's host withheld while they had something to do (`steal`), for other
            machines, or to work for this one, reading a virtual disk for example.
    """

    cores: int
    by_others: float
    withheld: float

    @property
    def much_by_others(self) -> bool:
        """Whether the other processes make figures worse."""
        return self.by_others >= MUCH_TAKEN * self.cores

    @property
    def remedy(self) -> str:
        """What to do if others take much."""
        # A core that is nearly free counts: a thread gets most of it.
        free = max(1, int(self.cores - self.by_others + 0.25))
        return (
            "Stop them, or compute on as many threads as cores are free, since all threads wait for the slowest: "
            f"OMP_NUM_THREADS={free}, or torch.set_num_threads({free}) in Python."
        )

    def describe(self) -> str:
        """Return a line such as "other processes took 0.02 of 2 cores, the host withheld 0.30"."""
        return f"other processes took {self.by_others:.2f} of {self.cores} cores, the host withheld {self.withheld:.2f}"


@dataclass(frozen=True)
class _Reading:
    """Seconds of processor time since some time in the past."""

    at_s: float
    busy_s: float
    withheld_s: float
    own_s: float


class CoreWatch:
    """A watch on the cores, from when it is made. This process's children (of `multiprocessing`) do not count as others.

    Args:
        proc: for tests.
        cores: numbers of the cores to watch; by default those that this process may use.
        clock: returns seconds; for tests.
        own_s: returns the seconds of processor time that this process and its children have taken; for tests.
    """

    def __init__(
        self,
        proc: Path = PROC,
        cores: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] | None = None,
    ) -> None:
        self._proc, self._clock = proc, clock
        self._own_s = own_s or (lambda: _own_s(proc))
        self._cores = usable_cores() if cores is None else frozenset(cores)
        self._begun = self._read()

    def taken(self) -> Taken | None:
        """Return what was taken since the watch was made.

        None if the system does not say (other than Linux), or if too little time has passed.
        """
        begun, now = self._begun, self._read()
        if begun is None or now is None or now.at_s - begun.at_s < SHORTEST_S:
            return None
        seconds = now.at_s - begun.at_s
        others_s = (now.busy_s - begun.busy_s) - (now.own_s - begun.own_s)
        return Taken(
            len(self._cores), max(0.0, others_s / seconds), max(0.0, now.withheld_s - begun.withheld_s) / seconds
        )

    def _read(self) -> _Reading | None:
        try:
            text = (self._proc / "stat").read_text(encoding="ascii")
        except OSError:
            return None
        busy = withheld = 0
        for line in text.splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                if len(words) < len(_FIELDS):
                    return None
                ticks = dict(zip(_FIELDS, map(int, words), strict=False))
                busy += sum(ticks[field] for field in _BUSY)
                withheld += ticks["steal"]
        return _Reading(self._clock(), busy / _ticks_per_s(), withheld / _ticks_per_s(), self._own_s())


class BusyCores:
    """Tells the user once if other processes keep cores busy while a model decodes, and what to do.

    The threads of a product spin until the slowest is done: if another process has one of two cores, a token can take
    eight times as long.

    Args:
        threads: returns how many threads the model computes on now.
        watch: makes a watch on the cores; for tests.
        clock: returns seconds; for tests.
    """

    def __init__(
        self,
        threads: Callable[[], int],
        watch: Callable[[], CoreWatch] = CoreWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads, self._make_watch, self._clock = threads, watch, clock
        self._watch: CoreWatch | None = None
        self._begun_s = self._computed_s = 0.0
        self._passes = 0
        self._told = False

    def pass_ended(self, duration_s: float) -> str | None:
        """Note that a pass of so many seconds has just ended. Return what to tell the user, at most once, else None."""
        if self._told:
            return None
        now_s = self._clock()
        if self._watch is None or now_s - self._begun_s > 2 * BUSY_STRETCH_S:  # nothing was computed for long
            self._watch, self._begun_s, self._computed_s, self._passes = self._make_watch(), now_s, 0.0, 0
            return None
        self._computed_s += duration_s
        self._passes += 1
        if now_s - self._begun_s < BUSY_STRETCH_S:
            return None
        taken, computed = self._watch.taken(), self._computed_s >= 0.5 * (now_s - self._begun_s)
        self._watch = None
        if taken is None or not computed or taken.by_others < BUSY_THREADS:
            return None
        if taken.cores - taken.by_others > min(self._threads(), taken.cores) - BUSY_THREADS:
            return None
        self._told = True
        return f"{taken.describe()}, while {self._passes} tokens took {self._computed_s:.1f} s. {taken.remedy}"


@contextmanager
def without_busy_cores() -> Iterator[None]:
    """Leave out the warning of `BusyCores` while the context lasts. For who says what others took in one place, at its end."""
    before = busy_cores_logger.disabled
    busy_cores_logger.disabled = True
    try:
        yield
    finally:
        busy_cores_logger.disabled = before


def taken_now(seconds: float = SAMPLE_S) -> Taken | None:
    """Sleep for so many seconds and return what others took meanwhile."""
    watch = CoreWatch()
    time.sleep(seconds)
    return watch.taken()


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _own_s(proc: Path) -> float:
    """Return the processor time of this process and its children, ended or not."""
    running_s = sum(_child_s(proc, child.pid) for child in multiprocessing.active_children())
    return sum(os.times()[:4]) + running_s  # user and system time, of this process and of children that have ended


def _child_s(proc: Path, pid: int | None) -> float:
    with suppress(OSError):  # it has just ended
        # After the name, which may hold anything: the state is field 3; 14 and 15 are ticks in user and system mode.
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _ticks_per_s()
    return 0.0
