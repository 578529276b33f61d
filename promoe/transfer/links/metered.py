"""How busy a link is, for those who watch: the time in which at least one of its transfers is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from promoe.stores.base import Chunk
from promoe.transfer.links.base import Link


class MeteredLink:
    """Moves chunks by another link and adds up the time in which it moves any.

    On a device this is the time in which copies are handed over, which is less than they take.

    Args:
        link: moves the bytes.
        clock: seconds, for tests.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        self.workers = link.workers
        self.copies_from_ram = link.copies_from_ram
        self._link = link
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)  # whatever else that link has

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        """Move one chunk; see `Link.transfer`."""
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since_s = self._clock()
        try:
            self._link.transfer(chunk, destination, address)
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += self._clock() - self._since_s

    def busy_s(self) -> float:
        """Seconds so far in which at least one transfer was under way, up to now."""
        with self._lock:
            return self._busy_s + (self._clock() - self._since_s if self._under_way else 0.0)

    def describe(self) -> str:
        """One line for reports."""
        return self._link.describe()

    def close(self) -> None:
        """Close the link."""
        self._link.close()
