"""The timetable of an emulated link: when a transfer that starts now will have arrived. It has no clock of its own.

The model is a copy engine behind a bus, as with PCIe: a transfer first has a latency (its set-up), then the wire to
itself for `nbytes / bandwidth`. Two transfers are in flight at once: the latency of one passes while another is on the
wire, so a busy link loses nothing to it. A third waits until the first has arrived.
"""

from __future__ import annotations

import math

IN_FLIGHT = 2


class Wire:
    """The wire of an emulated link. Not thread-safe.

    Args:
        bandwidth_bytes_per_s: bytes per second on the wire.
        latency_s: seconds from the start of a transfer until it takes the wire.
    """

    def __init__(self, bandwidth_bytes_per_s: float, latency_s: float) -> None:
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._arrivals_s = [-math.inf] * IN_FLIGHT  # of the latest transfers, oldest first

    def reserve(self, now_s: float, nbytes: int) -> float:
        """Put a transfer of `nbytes` that starts at `now_s` on the timetable. Return the time of its arrival, in seconds."""
        arrivals_s = self._arrivals_s
        issued_s = max(now_s, arrivals_s.pop(0))
        on_wire_s = max(issued_s + self._latency_s, arrivals_s[-1])
        arrival_s = on_wire_s + nbytes / self._bandwidth_bytes_per_s
        arrivals_s.append(arrival_s)
        return arrival_s
