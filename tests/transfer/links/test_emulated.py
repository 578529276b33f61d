from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest
import torch
from waiting import WAIT_S

from promoe.errors import ConfigError
from promoe.stores.base import Chunk
from promoe.transfer.link_timetable import IN_FLIGHT
from promoe.transfer.links import EmulatedLink, Link
from promoe.transfer.links.emulated import SLEEP_ERROR_S
from promoe.transfer.memory import HugePageRegion

from .conftest import MakeStore, RawFileStore


class FakeClock:
    """Time that passes only while somebody sleeps; even sleep(0) takes a microsecond."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.sleeps_s.append(seconds)
        self.now_s += max(seconds, 1e-6)


def chunk_of(nbytes: int) -> Chunk:
    return Chunk(0, nbytes, 0, 0, nbytes)


def test_transfers_end_when_their_bytes_would_have_arrived(make_store: MakeStore) -> None:
    content = bytes(range(256)) * 400
    store = make_store([content], [[chunk_of(100_000)]])
    clock = FakeClock()
    link = EmulatedLink(1e9, 20e-6).bind(store, clock=clock, sleep=clock.sleep)
    slot = HugePageRegion(200_000)
    for idx in range(1, 4):
        slot.fill(0)
        link.transfer(Chunk(500, 100_000, 0, 7, 100_000), slot.memory, slot.address)
        assert bytes(slot.memory[500:100_500]) == content[7:100_007]
        # Each starts when the one before has ended: wire time and latency add up.
        assert 0 <= clock.now_s - 100.0 - idx * 120e-6 <= idx * 2e-6


def test_a_wait_is_slept_except_for_the_error_of_a_sleep(make_store: MakeStore) -> None:
    clock = FakeClock()
    store = make_store([bytes(1000)], [[chunk_of(1000)]])
    link = EmulatedLink(1e6, 0.0).bind(store, clock=clock, sleep=clock.sleep)
    slot = HugePageRegion(1000)
    link.transfer(chunk_of(1000), slot.memory, slot.address)
    assert clock.sleeps_s[0] == pytest.approx(1e-3 - SLEEP_ERROR_S)
    assert clock.sleeps_s[1:] == [0.0] * len(clock.sleeps_s[1:])  # gives the core away, never spins on
    assert len(clock.sleeps_s[1:]) <= SLEEP_ERROR_S / 1e-6 + 1


def test_bytes_are_there_before_the_wait_and_slow_ones_end_it(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    store = make_store([bytes(1000)], [[chunk_of(1000)]])
    real: Callable[[Chunk, memoryview], None] = store.read
    read_s = 0.5e-3

    def slow_read(chunk: Chunk, destination: memoryview) -> None:
        assert clock.sleeps_s == []
        real(chunk, destination)
        clock.now_s += read_s

    monkeypatch.setattr(store, "read", slow_read)
    link = EmulatedLink(1e6, 0.0).bind(store, clock=clock, sleep=clock.sleep)
    slot = HugePageRegion(1000)
    link.transfer(chunk_of(1000), slot.memory, slot.address)
    assert clock.now_s == pytest.approx(100.001, abs=2e-6)  # the read's time is part of the wait
    clock.sleeps_s.clear()
    read_s = 3e-3
    link.transfer(chunk_of(1000), slot.memory, slot.address)
    assert clock.sleeps_s == []


def test_the_source_bytes_of_a_converted_chunk_take_the_wire(make_store: MakeStore) -> None:
    source = torch.randn(1000).to(torch.bfloat16)
    store = make_store([source.view(torch.uint8).numpy().tobytes()], [[chunk_of(10)]])
    clock = FakeClock()
    link = EmulatedLink(1e6).bind(store, clock=clock, sleep=clock.sleep)
    slot = HugePageRegion(5000)
    link.transfer(Chunk(64, 4000, 0, 0, 2000, torch.bfloat16, torch.float32), slot.memory, slot.address)
    assert torch.equal(torch.frombuffer(slot.memory, dtype=torch.float32, count=1000, offset=64), source.float())
    assert clock.now_s == pytest.approx(100.002, abs=2e-6)


def test_threads_share_one_wire(make_store: MakeStore) -> None:
    content = bytes(range(250)) * 40
    store = make_store([content], [[chunk_of(10_000)]])
    link = EmulatedLink(1e9, 1e-6).bind(store)
    slots = [HugePageRegion(1000) for _ in range(10)]

    def move(idx: int) -> None:
        link.transfer(Chunk(0, 1000, 0, idx * 1000, 1000), slots[idx].memory, slots[idx].address)

    threads = [threading.Thread(target=move, args=(idx,)) for idx in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for idx in range(10):
        assert bytes(slots[idx].memory) == content[idx * 1000 : (idx + 1) * 1000]


class Busy(Link):
    """A link whose transfers wait for each other: for long if they have to meet, for a moment if they must not."""

    workers = IN_FLIGHT

    def __init__(self, copies_from_ram: bool) -> None:
        self.copies_from_ram = copies_from_ram
        self.met: list[bool] = []
        self._meeting = threading.Barrier(IN_FLIGHT)

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        try:
            self._meeting.wait(0.5 if self.copies_from_ram else WAIT_S)
            self.met.append(True)
        except threading.BrokenBarrierError:
            self.met.append(False)

    def describe(self) -> str:
        return "busy"

    def close(self) -> None: ...


@pytest.mark.parametrize("copies_from_ram", [True, False])
def test_real_bytes_are_copied_one_chunk_at_a_time_but_read_as_the_link_likes(
    copies_from_ram: bool, make_store: MakeStore
) -> None:
    """There is one copy engine: two copies at once would take a second core from computing."""
    busy = Busy(copies_from_ram)
    link = EmulatedLink(1e9).bind(make_store([bytes(10)], [[chunk_of(10)]]), over=busy)
    slot = HugePageRegion(10)
    threads = [
        threading.Thread(target=link.transfer, args=(chunk_of(10), slot.memory, slot.address)) for _ in range(IN_FLIGHT)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert busy.met == [not copies_from_ram] * IN_FLIGHT


def test_a_failed_read_is_an_error_at_once(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    store = make_store([bytes(1000)], [[chunk_of(1000)]])
    link = EmulatedLink(1e6).bind(store, clock=clock, sleep=clock.sleep)
    slot = HugePageRegion(5000)
    with pytest.raises(OSError, match="expected 2000 bytes at offset 0, found 1000"):
        link.transfer(chunk_of(2000), slot.memory, slot.address)
    assert clock.sleeps_s == []


def test_a_closed_link_refuses(make_store: MakeStore) -> None:
    link = EmulatedLink(1e9).bind(make_store([bytes(10)], [[chunk_of(10)]]))
    assert isinstance(link, Link)
    link.close()
    link.close()
    slot = HugePageRegion(10)
    with pytest.raises(OSError, match="closed") as raised:
        link.transfer(chunk_of(10), slot.memory, slot.address)
    assert raised.value.errno == errno.EBADF


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (EmulatedLink(12e9, 20e-6), "emulated 12 GB/s, 20.0 µs latency"),
        (EmulatedLink(0.5e9), "emulated 0.5 GB/s, 0 ms latency"),
    ],
)
def test_describe(spec: EmulatedLink, expected: str) -> None:
    store = RawFileStore([], [[]])
    link = spec.bind(store)
    assert link.describe() == expected
    assert link.workers == 2


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("inf"), float("nan"), "12GB/s", None, True])
def test_a_bandwidth_that_cannot_work(bandwidth: object) -> None:
    with pytest.raises(ConfigError, match=r"'bandwidth_bytes_per_s' .* positive number of bytes per second. Got"):
        EmulatedLink(bandwidth)  # type: ignore[arg-type]


@pytest.mark.parametrize("latency_s", [-1e-9, float("inf"), float("nan"), "20us", None, False])
def test_a_latency_that_cannot_work(latency_s: object) -> None:
    with pytest.raises(ConfigError, match=r"'latency_s' .* number of seconds, 0 or more. Got"):
        EmulatedLink(1e9, latency_s)  # type: ignore[arg-type]


def test_a_spec_is_frozen_and_comparable() -> None:
    spec = EmulatedLink(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    with pytest.raises(AttributeError):
        spec.latency_s = 0.0  # type: ignore[misc]
    assert spec == EmulatedLink(1e9, 1e-6)
    assert len({spec, EmulatedLink(1e9, 1e-6)}) == 1
