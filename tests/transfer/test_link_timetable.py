"""The timetable of a link of set speed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promoe.transfer.link_timetable import IN_FLIGHT, Wire


def reserve(wire: Wire, transfers: Sequence[tuple[float, int]]) -> list[float]:
    return [wire.reserve(now_s, nbytes) for now_s, nbytes in transfers]


def test_one_transfer_takes_latency_and_wire_time() -> None:
    assert reserve(Wire(1e9, 10e-6), [(5.0, 1_000_000)]) == pytest.approx([5.00101])


def test_the_latency_of_one_passes_while_another_is_on_the_wire() -> None:
    arrivals = reserve(Wire(1e9, 10e-6), [(0.0, 1_000_000), (0.0, 2_000_000)])
    assert arrivals == pytest.approx([1.01e-3, 3.01e-3])


def test_a_third_waits_for_the_first_and_then_has_its_latency() -> None:
    arrivals = reserve(Wire(1e9, 5e-3), [(0.0, 1_000_000), (0.0, 1_000_000), (0.0, 1_000_000)])
    assert arrivals == pytest.approx([6e-3, 7e-3, 12e-3])  # set up from 6 ms on, on the wire from 11 ms on


def test_an_idle_wire_starts_at_once() -> None:
    arrivals = reserve(Wire(1e9, 10e-6), [(0.0, 1_000_000), (2.0, 1_000_000)])
    assert arrivals == pytest.approx([1.01e-3, 2.00101])


@given(
    bandwidth=st.floats(1e6, 1e11),
    latency_s=st.floats(0, 1e-2),
    transfers=st.lists(st.tuples(st.floats(0, 1e-2), st.integers(1, 1 << 24)), min_size=1, max_size=30),
)
def test_the_wire_carries_one_transfer_at_a_time_and_two_are_in_flight(
    bandwidth: float, latency_s: float, transfers: list[tuple[float, int]]
) -> None:
    starts, now_s = [], 0.0
    for gap_s, nbytes in transfers:
        now_s += gap_s
        starts.append((now_s, nbytes))
    arrivals = reserve(Wire(bandwidth, latency_s), starts)
    for idx, ((start_s, nbytes), arrival_s) in enumerate(zip(starts, arrivals, strict=True)):
        wire_s = nbytes / bandwidth
        possible = [start_s + latency_s + wire_s]
        if idx >= 1:
            possible.append(arrivals[idx - 1] + wire_s)
        if idx >= IN_FLIGHT:
            possible.append(arrivals[idx - IN_FLIGHT] + latency_s + wire_s)
        assert arrival_s == pytest.approx(max(possible), rel=1e-9)  # as late as it must be, and no later


def test_a_busy_wire_loses_nothing_to_a_short_latency() -> None:
    arrivals = reserve(Wire(2e9, 20e-6), [(0.0, 4_000_000)] * 100)
    assert arrivals[-1] == pytest.approx(20e-6 + 100 * 2e-3)
