from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest

from promoe.errors import ConfigError
from promoe.stores.base import Chunk
from promoe.transfer.links import probe as module
from promoe.transfer.links.probe import ReadBandwidth, _requests, all_chunks, best_bandwidth, probe_read_bandwidth

from .conftest import MakeStore, RawFile, RawFileStore


def plain(offset_bytes: int, nbytes: int, source_idx: int = 0) -> Chunk:
    return Chunk(0, nbytes, source_idx, offset_bytes, nbytes)


def test_requests_cover_the_ranges_in_whole_blocks() -> None:
    chunks = [plain(5_000, 20_000), plain(25_000, 3_000), plain(90_000, 10), plain(100, 50, source_idx=1)]
    assert _requests(chunks, 8192) == [
        (0, 4096, 8192),
        (0, 12_288, 8192),
        (0, 20_480, 8192),  # 5,000 to 28,000 is one range
        (0, 86_016, 4096),
        (1, 0, 4096),
    ]


def test_ranges_inside_one_another_are_one_range() -> None:
    assert _requests([plain(0, 20_000), plain(4_000, 100), plain(20_000, 100)], 1 << 20) == [(0, 0, 20_480)]


def test_requests_of_no_chunks_are_none() -> None:
    assert _requests([], 4096) == []


def test_all_chunks_of_all_experts(raw_files: list[RawFile]) -> None:
    experts = [[plain(expert * 100, 100), plain(expert * 100 + 50, 50)] for expert in range(3)]
    store = RawFileStore(raw_files, experts)
    assert list(all_chunks(store)) == [chunk for chunks in experts for chunk in chunks]
    store.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_probe_reads_requests_of_its_size_inside_the_experts_ranges(
    mode: Any, depth: int, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([os.urandom(100_003), os.urandom(50_000)], [[plain(40_000, 60_003)], [plain(0, 9_000, 1)]])
    reads: list[tuple[int, int, int]] = []
    real = os.preadv

    def record(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        reads.append((len(buffers[0]), offset, count))
        return count

    monkeypatch.setattr(os, "preadv", record)
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3))
    reading = probe_read_bandwidth(store, 16_384, depth, mode, 0.02)
    reads = [read for read in reads if read[0] > 4096]  # not the tries at opening
    assert {offset for _, offset, _ in reads} <= {0, 36_864, 53_248, 69_632, 86_016}
    assert len({offset for _, offset, _ in reads}) > 1
    assert all(nbytes <= 16_384 for nbytes, _, _ in reads)
    assert reading.bytes_read == sum(count for _, _, count in reads)
    assert (reading.mode, reading.request_bytes, reading.depth) == (mode, 16_384, depth)
    assert reading.bytes_per_s == pytest.approx(reading.bytes_read / reading.elapsed_s)
    assert reading.elapsed_s > 0


def test_the_best_of_all_settings_interleaved(
    mode: Any, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([os.urandom(100_003)], [[plain(0, 100_003)]])
    readings: list[ReadBandwidth] = []

    def recorded(*args: Any, **kwargs: Any) -> ReadBandwidth:
        readings.append(probe_read_bandwidth(*args, **kwargs))
        return readings[-1]

    monkeypatch.setattr(module, "probe_read_bandwidth", recorded)
    best = best_bandwidth(store, mode, request_bytes=(4096, 16_384), depths=(1, 2), seconds=0.005, rounds=2)
    settings = [(4096, 1), (4096, 2), (16_384, 1), (16_384, 2)]
    assert [(reading.request_bytes, reading.depth) for reading in readings] == settings * 2
    assert best.bytes_per_s == max(reading.bytes_per_s for reading in readings)


def test_best_is_by_speed_not_by_bytes(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ReadBandwidth("direct", 4096, 1, 1000, 10.0)
    fast = ReadBandwidth("direct", 8192, 1, 500, 1.0)
    readings = iter([slow, fast, slow])
    monkeypatch.setattr(module, "probe_read_bandwidth", lambda *args, **kwargs: next(readings))
    store = make_store([bytes(9000)], [[plain(0, 9000)]])
    assert best_bandwidth(store, "direct", request_bytes=(4096,), depths=(1, 2, 3), seconds=0.1, rounds=1) is fast


def test_only_the_chunks_that_are_asked_for(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store([os.urandom(100_003)], [[plain(0, 100_003)]])
    offsets: set[int] = set()
    real = os.preadv

    def record(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.add(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", record)
    probe_read_bandwidth(store, 4096, 1, "page_cache", 0.005, chunks=[plain(50_000, 100)])
    assert offsets == {49_152}


@pytest.mark.parametrize(
    ("request_bytes", "depth", "seconds"), [(0, 1, 1.0), (5000, 1, 1.0), (4096, 0, 1.0), (4096, 1, 0)]
)
def test_settings_that_cannot_work(request_bytes: int, depth: int, seconds: float, make_store: MakeStore) -> None:
    store = make_store([bytes(9000)], [[plain(0, 9000)]])
    with pytest.raises(ConfigError, match=f"Got {request_bytes}, {depth} and {seconds} instead"):
        probe_read_bandwidth(store, request_bytes, depth, "page_cache", seconds)


def test_nothing_to_read(make_store: MakeStore) -> None:
    store = make_store([bytes(9000)], [[plain(0, 9000)]])
    with pytest.raises(ConfigError, match="at least one chunk"):
        probe_read_bandwidth(store, 4096, 1, "page_cache", 0.01, chunks=[])


def test_a_reading_thread_s_error_surfaces(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store([bytes(9000)], [[plain(0, 9000)]])

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        probe_read_bandwidth(store, 4096, 2, "page_cache", 0.01)
