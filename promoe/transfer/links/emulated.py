"""A link of set speed, for tests and to emulate another machine: bytes are real, only their arrival is delayed."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from promoe.errors import ConfigError
from promoe.stores.base import Chunk, Store
from promoe.transfer.link_timetable import IN_FLIGHT, Wire
from promoe.transfer.links.base import Link, LinkWrapper
from promoe.transfer.links.host import HostLink
from promoe.units import format_seconds

# time.sleep wakes up about this much too late. The rest of a wait is spent yielding.
SLEEP_ERROR_S = 50e-6


@dataclass(frozen=True)
class EmulatedLink:
    """An emulated link, to be passed as `link=`. Bytes are real, only their arrival is delayed.

    Args:
        bandwidth_bytes_per_s: bytes per second on the wire, for example 12e9.
        latency_s: seconds from the start of a transfer until it takes the wire, for example 20e-6.

    Raises:
        ConfigError: the bandwidth is not positive and finite, or the latency is negative or not finite.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        bandwidth, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        if not _is_number(bandwidth) or not 0 < bandwidth < math.inf:
            raise ConfigError(
                "The 'bandwidth_bytes_per_s' of an emulated link must be a positive number of bytes per second. "
                f"Got {bandwidth!r} instead. For 12 GB/s write 12e9."
            )
        if not _is_number(latency_s) or not 0 <= latency_s < math.inf:
            raise ConfigError(
                "The 'latency_s' of an emulated link must be a number of seconds, 0 or more. "
                f"Got {latency_s!r} instead. For 20 µs write 20e-6."
            )

    def bind(
        self,
        store: Store,
        *,
        over: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> BoundEmulatedLink:
        """Return the link over a store.

        Args:
            store: where the experts are.
            over: moves the real bytes; closed with this link. By default a core copies them, so leave one core free of
                computing (`torch.set_num_threads`).
            clock: returns seconds; for tests.
            sleep: for tests.
        """
        return BoundEmulatedLink(self, over or HostLink(store), clock, sleep)


class BoundEmulatedLink(LinkWrapper):
    """An emulated link over a real one. Made by `EmulatedLink.bind`.

    A transfer whose real bytes take longer than the emulated wire ends when they have come.
    """

    def __init__(
        self, spec: EmulatedLink, link: Link, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        super().__init__(link)
        self.workers = IN_FLIGHT
        self.copies_from_ram = False
        self.emulated_bytes_per_s = spec.bandwidth_bytes_per_s
        self._spec = spec
        self._clock = clock
        self._sleep = sleep
        self._wire = Wire(spec.bandwidth_bytes_per_s, spec.latency_s)
        self._lock = threading.Lock()
        # A device has one copy engine, so one copy is made at a time: a second one would take another core from computing.
        self._engine: AbstractContextManager[object] = threading.Lock() if link.copies_from_ram else nullcontext()
        self._closed = False

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Move one chunk, then wait until it would have arrived; see `Link.transfer`.

        The source's bytes count on the wire: a conversion happens on arrival.
        """
        if self._closed:
            raise OSError(errno.EBADF, "The link is closed")
        with self._lock:
            arrival_s = self._wire.reserve(self._clock(), chunk.source_nbytes)
        with self._engine:
            self.link.transfer(chunk, destination, address)
        while (left_s := arrival_s - self._clock()) > 0:
            # In the last microseconds, sleep(0) gives the core and the interpreter lock to others.
            self._sleep(left_s - SLEEP_ERROR_S if left_s > 2 * SLEEP_ERROR_S else 0.0)

    def describe(self) -> str:
        """Return one line for reports, such as "emulated 12.0 GB/s, 20.0 µs latency"."""
        speed = f"emulated {self._spec.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
        return f"{speed}, {format_seconds(self._spec.latency_s)} latency"

    def close(self) -> None:
        """Refuse further transfers."""
        self._closed = True
        self.link.close()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
