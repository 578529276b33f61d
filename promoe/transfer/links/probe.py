"""How fast this machine can read a store's files at best, now: the W in the bound `max(C, B / W)`.

A probe reads whole blocks into huge-page memory, without a scheduler, slots or a model. As with slots, each read goes
to another place: a virtual disk reads a quarter faster into memory that the processor's caches hold. Measure a probe
and what it is compared with in one run: the speed of a virtual disk depends on what the host has cached.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from promoe.errors import ConfigError
from promoe.files import open_plain
from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, Store
from promoe.stores.open_files import OPEN_FILES, Descriptor, KeptFile
from promoe.transfer.links.direct import PAGE_BYTES, DirectFiles
from promoe.transfer.memory import HugePageRegion

MIB = 1024 * 1024
DEPTHS = (1, 2, 3)
# The reads of one thread go to so much memory in turn: more than a core's share of the processor's caches.
DESTINATION_BYTES = 96 * MIB
ProbeMode = Literal["page_cache", "direct"]
# File number, offset and length in bytes.
_Request = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """What one setting of a probe reached."""

    mode: ProbeMode
    request_bytes: int
    depth: int
    """Threads with one request in flight each."""
    bytes_read: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second of wall time."""
        return self.bytes_read / self.elapsed_s


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
        mode: past the page cache ("direct") or through it. The caller makes it warm or cold (`drop_files`).
        seconds: how long to read; ranges are read again once all were read.
        chunks: whose ranges to read; by default those of all experts.
        seed: of the order of requests.

    Raises:
        ConfigError: a request, depth or time that cannot work, or no chunks.
        DirectUnsupportedError: the mode is "direct" and the file system has no O_DIRECT.
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
    """Read a whole file of at least `request_bytes`, whatever is in it; see `probe_read_bandwidth`."""
    whole_bytes = path.stat().st_size // request_bytes * request_bytes
    requests = [(0, offset_bytes, request_bytes) for offset_bytes in range(0, whole_bytes, request_bytes)]
    return _probe([path], requests, request_bytes, depth, mode, seconds, seed=0)


def best_bandwidth(
    store: Store,
    mode: ProbeMode,
    *,
    request_bytes: Sequence[int],
    depths: Sequence[int] = DEPTHS,
    seconds: float,
    rounds: int = 2,
) -> ReadBandwidth:
    """Probe every request size at every depth, the settings interleaved over `rounds`, and return the fastest reading.

    Takes about `len(request_bytes) * len(depths) * rounds * seconds`. See `probe_read_bandwidth`.
    """
    chunks = list(all_chunks(store))
    return max(
        (
            probe_read_bandwidth(store, size_bytes, depth, mode, seconds, chunks=chunks, seed=round_idx)
            for round_idx in range(rounds)
            for size_bytes in request_bytes
            for depth in depths
        ),
        key=lambda reading: reading.bytes_per_s,
    )


def all_chunks(store: Store) -> Iterator[Chunk]:
    """Yield every chunk of every expert, in the order of the model."""
    for layer_idx, num_experts in enumerate(store.num_experts):
        for expert_idx in range(num_experts):
            yield from store.chunks(ExpertKey(layer_idx, expert_idx))


def _probe(
    paths: Sequence[Path],
    requests: list[_Request],
    request_bytes: int,
    depth: int,
    mode: ProbeMode,
    seconds: float,
    seed: int,
) -> ReadBandwidth:
    random.Random(seed).shuffle(requests)
    files = DirectFiles(dict(enumerate(paths))) if mode == "direct" else _BufferedFiles(paths)
    nbytes = max(1, DESTINATION_BYTES // request_bytes) * request_bytes
    buffers = [HugePageRegion(nbytes, prefault=True) for _ in range(depth)]
    todo = itertools.cycle(requests)
    start_together = threading.Barrier(depth)

    def read_for_a_while(buffer: HugePageRegion) -> tuple[int, float, float]:
        start_together.wait()
        return _read_until(files, todo, buffer.memory, request_bytes, seconds)

    with ThreadPoolExecutor(depth, thread_name_prefix="promoe-probe") as pool:
        results = list(pool.map(read_for_a_while, buffers))
    bytes_read, started_s, ended_s = zip(*results, strict=True)
    return ReadBandwidth(mode, request_bytes, depth, sum(bytes_read), max(ended_s) - min(started_s))


class _BufferedFiles:
    """The same as `DirectFiles`, through the page cache."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._opens = [partial(_open_buffered, path) for path in paths]
        self._files = [KeptFile(OPEN_FILES.opened(open_one)) for open_one in self._opens]

    def descriptor(self, file_idx: int) -> Descriptor:
        return self._files[file_idx].descriptor(self._opens[file_idx])


def _open_buffered(path: Path) -> Descriptor:
    return Descriptor(path, open_plain(path))


def _requests(chunks: Iterable[Chunk], request_bytes: int) -> list[_Request]:
    """Return requests of whole blocks that cover the chunks. Chunks that touch are one range."""
    requests: list[_Request] = []
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
    files: DirectFiles | _BufferedFiles,
    todo: Iterator[_Request],
    buffer: memoryview,
    request_bytes: int,
    seconds: float,
) -> tuple[int, float, float]:
    """Read for so many seconds. Return the bytes read, and the times of start and end in seconds."""
    bytes_read = 0
    places = itertools.cycle(range(0, len(buffer) - request_bytes + 1, request_bytes))
    start_s = time.perf_counter()
    while True:
        file_idx, offset_bytes, nbytes = next(todo)
        place = next(places)
        descriptor = files.descriptor(file_idx)  # held while it is read
        bytes_read += os.preadv(descriptor.fd, [buffer[place : place + nbytes]], offset_bytes)
        now_s = time.perf_counter()
        if now_s - start_s >= seconds:
            return bytes_read, start_s, now_s
