"""Links that fail on purpose and reproducibly, as disks, drivers and bugs do; for tests and `promoe doctor --chaos`."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from promoe.errors import ConfigError
from promoe.stores.base import Chunk
from promoe.transfer.links.base import Link, LinkWrapper

FaultKind = Literal["failed", "short", "slow", "stuck", "wrong", "torn", "bug", "exit", "gone", "no_memory"]
GARBAGE = 0xFF


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one transfer.

    Args:
        kind: "failed" (EIO, nothing written), "short" (the first half, then the file ends), "slow", "stuck" (until
            `FaultyLink.release` is set), "wrong" (one byte differs, without an error), "torn" (garbage, then EIO),
            "bug" (RuntimeError), "exit" (SystemExit, which ends a worker), "gone" (this and every later transfer fails
            with ENODEV until `FaultyLink.mend`), "no_memory" (MemoryError).
        seconds: how much longer a slow transfer takes, half of it before and half after the bytes are written.

    Raises:
        ConfigError: there is no such kind.
    """

    kind: FaultKind
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ConfigError(f"The 'kind' of a fault must be one of {get_args(FaultKind)}. Got {self.kind!r} instead.")


Plan = Callable[[int, Chunk], Fault | None]
"""A pure function: a transfer's number, from 0 in order of starting, and its chunk -> its fault; None: it succeeds."""


def seeded(seed: int, shares: Mapping[FaultKind, float], seconds: float = 1e-3) -> Plan:
    """Return a plan that draws each transfer's fault. A draw depends on the seed and the transfer's number alone.

    Args:
        seed: of the draws.
        shares: kind -> share of all transfers, 0 to 1; the others succeed.
        seconds: how much longer a slow transfer takes at most.

    Raises:
        ConfigError: a kind is unknown, a share is negative, or together they exceed 1.
    """
    faults = [Fault(kind) for kind in shares]
    if any(not share >= 0 for share in shares.values()) or sum(shares.values()) > 1 + 1e-9:
        raise ConfigError(
            f"The 'shares' of faults must be 0 or more and at most 1 together. Got {dict(shares)} instead."
        )

    def plan(number: int, chunk: Chunk) -> Fault | None:
        draws = random.Random((seed << 32) + number)
        drawn = draws.random()
        for fault, share in zip(faults, shares.values(), strict=True):
            drawn -= share
            if drawn < 0:
                return Fault("slow", draws.uniform(0, seconds)) if fault.kind == "slow" else fault
        return None

    return plan


class FaultyLink(LinkWrapper):
    """A link into RAM whose transfers fail as a plan says. Put one over an open model's link to make its transfers fail.

    Args:
        link: moves the bytes; closed with this link. A transfer that is stuck then stays so.
        plan: asked once per transfer; calls do not overlap.
        sleep: for tests of this class.

    Attributes:
        injected: faults so far, by kind.
        release: set it to end this and later stuck transfers.
        stuck: set once a transfer is stuck.
    """

    def __init__(self, link: Link, plan: Plan, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(link)
        self.injected: Counter[FaultKind] = Counter()
        self.release = threading.Event()
        self.stuck = threading.Event()
        self._plan: Plan = plan
        self._sleep = sleep
        self._lock = threading.Lock()
        self._started = 0
        self._gone = False

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Move one chunk, or fail as planned; see `Link.transfer`."""
        fault, number = self._next(chunk)
        if fault is None:
            self.link.transfer(chunk, destination, address)
            return
        self._before(fault, chunk, destination)
        self.link.transfer(chunk, destination, address)
        if fault.kind == "wrong":
            destination[chunk.slot_offset_bytes + number % chunk.nbytes] ^= GARBAGE
        elif fault.kind == "slow":
            self._sleep(fault.seconds / 2)

    def mend(self) -> None:
        """Inject no more faults: the disk is back, and stuck transfers go on."""
        with self._lock:
            self._plan, self._gone = _no_faults, False
        self.release.set()

    def describe(self) -> str:
        """Return one line for reports."""
        return f"{self.link.describe()}, with injected faults"

    def _next(self, chunk: Chunk) -> tuple[Fault | None, int]:
        with self._lock:
            number, self._started = self._started, self._started + 1
            fault = Fault("gone") if self._gone else self._plan(number, chunk)
            if fault is not None:
                self.injected[fault.kind] += 1
                self._gone = fault.kind == "gone"
            return fault, number

    def _before(self, fault: Fault, chunk: Chunk, destination: memoryview) -> None:
        """Do what a fault does before the bytes are moved. Most faults raise here."""
        what = f"injected: {chunk.source_nbytes} bytes at offset {chunk.source_offset_bytes}"
        start, half_bytes = chunk.slot_offset_bytes, (chunk.nbytes + 1) // 2
        if fault.kind == "slow":
            self._sleep(fault.seconds / 2)
        elif fault.kind == "stuck":
            self.stuck.set()
            self.release.wait()
        elif fault.kind in ("short", "torn"):
            destination[start : start + half_bytes] = bytes([GARBAGE]) * half_bytes
            cause = "File ends early" if fault.kind == "short" else "Input/output error"
            raise OSError(errno.EIO, f"{cause} ({what}, found {half_bytes})")
        elif fault.kind in ("failed", "gone"):
            code = errno.EIO if fault.kind == "failed" else errno.ENODEV
            raise OSError(code, f"{'Input/output error' if fault.kind == 'failed' else 'No such device'} ({what})")
        elif fault.kind == "no_memory":
            raise MemoryError(what)
        elif fault.kind == "bug":
            raise RuntimeError(what)
        elif fault.kind == "exit":
            raise SystemExit(what)


def _no_faults(number: int, chunk: Chunk) -> None:
    return None
