"""A meter for a link: it adds up the time in which at least one transfer is in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from promoe.stores.base import Chunk
from promoe.transfer.links.base import Link, LinkWrapper


class MeteredLink(LinkWrapper):
    """A link that adds up the time in which another one moves something.

    For a device this is the time that it takes to queue copies, which is less than they take.

    Args:
        link: moves the bytes.
        clock: returns seconds; for tests.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(link)
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since_s = 0.0
        self._busy_s = 0.0

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        """Move one chunk; see `Link.transfer`."""
        with self._lock:
            self._in_flight += 1
            if self._in_flight == 1:
                self._since_s = self._clock()
        try:
            self.link.transfer(chunk, destination, address)
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._busy_s += self._clock() - self._since_s

    def busy_s(self) -> float:
        """Return the seconds up to now in which at least one transfer was in flight."""
        with self._lock:
            return self._busy_s + (self._clock() - self._since_s if self._in_flight else 0.0)
