"""Links that are slow or that fail, on purpose and reproducibly, around any link."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable

from promoe.links import Link
from promoe.stores.base import Chunk


class DelayedLink:
    """Delays each transfer by a random time, half of it before the bytes are written and half of it after.

    With several workers, chunks so complete in another order than they were started in.

    Args:
        link: moves the bytes.
        rng: draws the delays; the draws, not their order over threads, depend on its seed alone.
        max_delay_s: longest delay.
        sleep: for tests of this class.
    """

    def __init__(
        self,
        link: Link,
        rng: random.Random,
        max_delay_s: float = 1e-3,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.workers = link.workers
        self.copies_from_ram = False
        self._link = link
        self._rng = rng
        self._max_delay_s = max_delay_s
        self._sleep = sleep

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        delay_s = self._rng.uniform(0, self._max_delay_s)
        self._sleep(delay_s / 2)
        self._link.transfer(chunk, destination, address)
        self._sleep(delay_s / 2)

    def describe(self) -> str:
        return f"delayed {self._link.describe()}"

    def close(self) -> None:
        self._link.close()


class FailingLink:
    """Fails chosen transfers with an OSError (EIO), after writing garbage to the chunk's range as a torn read would.

    Args:
        link: moves the bytes of the transfers that succeed.
        should_fail: asked once per transfer, with its chunk; calls do not overlap.

    Attributes:
        failures: transfers that failed so far.
    """

    def __init__(self, link: Link, should_fail: Callable[[Chunk], bool]) -> None:
        self.workers = link.workers
        self.copies_from_ram = False
        self.failures = 0
        self._link = link
        self._should_fail = should_fail
        self._lock = threading.Lock()

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        with self._lock:
            fails = self._should_fail(chunk)
            self.failures += fails
        if not fails:
            self._link.transfer(chunk, destination, address)
            return
        torn_bytes = (chunk.nbytes + 1) // 2
        start = chunk.slot_offset_bytes
        destination[start : start + torn_bytes] = b"\xff" * torn_bytes
        raise OSError(errno.EIO, f"injected failure of {chunk.nbytes} bytes at offset {chunk.source_offset_bytes}")

    def describe(self) -> str:
        return f"failing {self._link.describe()}"

    def close(self) -> None:
        self._link.close()
