"""How fast a store's files can be read at best on this machine, now: the W in the bound `max(C, B / W)`.

Raw reads of whole blocks into huge-page memory, without a scheduler, slots or a model. As into slots, each read goes
elsewhere: into memory that the processor's caches hold, a virtual disk reads a quarter faster. A probe and what it is compared
with belong into one run: a virtual disk's speed depends on what the host has cached.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, Store
from promoe.transfer.links.alignment import PAGE_BYTES
from promoe.transfer.links.direct import Descriptor, DirectFiles
from promoe.transfer.memory import HugePageRegion

MIB = 1024 * 1024
REQUEST_BYTES = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 2, 3)
# What the reads of one thread go to in turn; more than a core's share of the processor's caches.
DESTINATION_BYTES = 96 * MIB
ProbeMode = Literal["page_cache", "direct"]


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """One setting of a probe and what it reached."""

    mode: ProbeMode
    request_bytes: int
    depth: int
    """Threads with one request in flight each."""
    bytes_read: int
    elapsed_s: float
    cpu_s: float
    """CPU time of the reading threads, copies by the kernel included."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second of wall time."""
        return self.bytes_read / self.elapsed_s


@dataclass(frozen=True, slots=True)
class BandwidthProbe:
    """All readings of a probe over several settings."""

    readings: tuple[ReadBandwidth, ...]

    @property
    def best(self) -> ReadBandwidth:
        """The fastest reading: W of the bound."""
        return max(self.readings, key=lambda reading: reading.bytes_per_s)


def probe_read_bandwidth(
    store: Store,
    request_bytes: int = 4 * MIB,
    depth: int = 2,
    mode: ProbeMode = "direct",
    seconds: float = 0.5,
    *,
    chunks: Iterable[Chunk] | None = None,
    seed: int = 0,
) -> ReadBandwidth:
    """Read the files' expert ranges in requests of `request_bytes`, in random order, from `depth` threads.

    Args:
        store: whose files to read.
        request_bytes: length of a request, a multiple of 4096; shorter where a range ends.
        depth: requests in flight, at least 1.
        mode: past the page cache ("direct") or through it. Warm or cold is up to the caller (`drop_page_cache`).
        seconds: how long to read; ranges are read again when all were read.
        chunks: read the ranges of these chunks only; by default of all experts.
        seed: of the order of requests.

    Raises:
        ConfigError: a request, depth or time that cannot work, or no chunks.
        DirectUnsupportedError: "direct" where the file system has no O_DIRECT.
        OSError: a file cannot be read.
    """
    if request_bytes < PAGE_BYTES or request_bytes % PAGE_BYTES or depth < 1 or not seconds > 0:
        raise ConfigError(
            f"A probe needs 'request_bytes' in multiples of {PAGE_BYTES}, 'depth' of at least 1 and 'seconds' above "
            f"0. Got {request_bytes}, {depth} and {seconds} instead."
        )
    requests = _requests(all_chunks(store) if chunks is None else chunks, request_bytes)
    if not requests:
        raise ConfigError("A probe needs at least one chunk to read. Got none.")
    return _probe([file.path for file in store.files], requests, request_bytes, depth, mode, seconds, seed)


def probe_file(path: Path, request_bytes: int, depth: int, mode: ProbeMode, seconds: float) -> ReadBandwidth:
    """The same for a whole file of at least `request_bytes`, whatever is in it."""
    whole_bytes = path.stat().st_size // request_bytes * request_bytes
    requests = [(0, offset_bytes, request_bytes) for offset_bytes in range(0, whole_bytes, request_bytes)]
    return _probe([path], requests, request_bytes, depth, mode, seconds, seed=0)


def _probe(
    paths: Sequence[Path],
    requests: list[tuple[int, int, int]],
    request_bytes: int,
    depth: int,
    mode: ProbeMode,
    seconds: float,
    seed: int,
) -> ReadBandwidth:
    random.Random(seed).shuffle(requests)
    direct = mode == "direct"
    numbered = dict(enumerate(paths))
    descriptors = (
        DirectFiles(numbered).descriptors
        if direct
        else {i: Descriptor(path, os.O_RDONLY) for i, path in numbered.items()}
    )
    nbytes = max(1, DESTINATION_BYTES // request_bytes) * request_bytes
    buffers = [HugePageRegion(nbytes, prefault=True) for _ in range(depth)]
    todo = itertools.cycle(requests)
    start_together = threading.Barrier(depth)

    def read_for_a_while(buffer: HugePageRegion) -> tuple[int, float, float, float]:
        return _read_until(descriptors, todo, buffer.memory, request_bytes, start_together, seconds)

    with ThreadPoolExecutor(depth, thread_name_prefix="promoe-probe") as pool:
        results = list(pool.map(read_for_a_while, buffers))
    bytes_read, started_s, ended_s, cpu_s = zip(*results, strict=True)
    elapsed_s = max(ended_s) - min(started_s)
    return ReadBandwidth(mode, request_bytes, depth, sum(bytes_read), elapsed_s, sum(cpu_s))


def best_bandwidth(
    store: Store,
    mode: ProbeMode = "direct",
    *,
    request_bytes: Sequence[int] = REQUEST_BYTES,
    depths: Sequence[int] = DEPTHS,
    seconds: float = 0.3,
    rounds: int = 2,
    chunks: Iterable[Chunk] | None = None,
) -> BandwidthProbe:
    """Probe every request size at every depth, the settings interleaved over `rounds`.

    Takes about `len(request_bytes) * len(depths) * rounds * seconds`. Arguments and errors as `probe_read_bandwidth`.
    """
    to_read = list(all_chunks(store) if chunks is None else chunks)
    settings = [
        (round_idx, size_bytes, depth)
        for round_idx in range(rounds)
        for size_bytes in request_bytes
        for depth in depths
    ]
    if not settings:
        raise ConfigError(
            f"A probe needs a request size, a depth and a round. Got {request_bytes}, {depths}, {rounds}."
        )
    return BandwidthProbe(
        tuple(
            probe_read_bandwidth(store, size_bytes, depth, mode, seconds, chunks=to_read, seed=round_idx)
            for round_idx, size_bytes, depth in settings
        )
    )


def all_chunks(store: Store) -> Iterator[Chunk]:
    """Every chunk of every expert, in model order."""
    for layer_idx, num_experts in enumerate(store.num_experts):
        for expert_idx in range(num_experts):
            yield from store.chunks(ExpertKey(layer_idx, expert_idx))


def _requests(chunks: Iterable[Chunk], request_bytes: int) -> list[tuple[int, int, int]]:
    """(file, offset, bytes) in whole blocks that cover the chunks; chunks that touch are one range."""
    requests: list[tuple[int, int, int]] = []
    ranges = sorted((chunk.source_idx, chunk.source_offset_bytes, chunk.source_nbytes) for chunk in chunks)
    current_file, covered_bytes = -1, 0
    start = 0
    for file_idx, offset_bytes, nbytes in [*ranges, (-1, 0, 0)]:
        if file_idx != current_file or offset_bytes > covered_bytes:
            if current_file >= 0:
                last = -(-covered_bytes // PAGE_BYTES) * PAGE_BYTES
                cuts = range(start, last, request_bytes)
                requests += [(current_file, cut, min(request_bytes, last - cut)) for cut in cuts]
            current_file, covered_bytes = file_idx, 0
            start = offset_bytes // PAGE_BYTES * PAGE_BYTES
        covered_bytes = max(covered_bytes, offset_bytes + nbytes)
    return requests


def _read_until(
    descriptors: Mapping[int, Descriptor],
    todo: Iterator[tuple[int, int, int]],
    buffer: memoryview,
    request_bytes: int,
    start_together: threading.Barrier,
    seconds: float,
) -> tuple[int, float, float, float]:
    """Bytes read, start, end, CPU seconds of one thread."""
    start_together.wait()
    bytes_read = 0
    places = itertools.cycle(range(0, len(buffer) - request_bytes + 1, request_bytes))
    start_s, cpu_start_s = time.perf_counter(), time.thread_time()
    while True:
        file_idx, offset_bytes, nbytes = next(todo)
        place = next(places)
        bytes_read += os.preadv(descriptors[file_idx].fd, [buffer[place : place + nbytes]], offset_bytes)
        now_s = time.perf_counter()
        if now_s - start_s >= seconds:
            return bytes_read, start_s, now_s, time.thread_time() - cpu_start_s
