"""Measures how much computing and reading slow each other when a machine does both at once.

The bound `max(C, B / W)` takes C from a model that computes while nothing is read, and W from reads while nothing computes.
But the bytes of a disk pass through the same cores and memory (on a virtual machine, also those of the host), so both slow
down when they overlap. `Contention.token_s` is the least time per token with that counted in.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from promoe.stores import Store
from promoe.transfer.links.probe import ProbeMode, ReadBandwidth, probe_read_bandwidth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REQUEST_BYTES = 4 * 2**20
SECONDS = 2.5
# Each median is of at least this many passes, however long they take.
FEWEST_PASSES = 5


@dataclass(frozen=True)
class Contention:
    """How much slower both are at once.

    Attributes:
        slowdown: how many times as long a decode pass takes while reads go on, at least 1.
        bandwidth_bytes_per_s: of reads while the model computes.
    """

    slowdown: float
    bandwidth_bytes_per_s: float

    def token_s(self, compute_s: float, nbytes: float, bandwidth_bytes_per_s: float) -> float:
        """Return the least seconds per token: both work at once as long as both have work, then one finishes alone.

        Args:
            compute_s: C, seconds per token with everything resident and nothing read.
            nbytes: B, to be read per token.
            bandwidth_bytes_per_s: W, of reads while nothing computes.
        """
        beside_bytes_per_s = min(self.bandwidth_bytes_per_s, bandwidth_bytes_per_s)
        both_s = min(self.slowdown * compute_s, nbytes / beside_bytes_per_s)
        compute_left_s = compute_s - both_s / self.slowdown
        read_left_s = (nbytes - both_s * beside_bytes_per_s) / bandwidth_bytes_per_s
        return both_s + max(compute_left_s, read_left_s, 0.0)


def measure_contention(
    model: PreTrainedModel,
    ids: Sequence[int],
    store: Store,
    mode: ProbeMode,
    workers: int,
    seconds: float = SECONDS,
) -> Contention:
    """Let a model decode for a while without reads, with reads of a store's files, and without reads again.

    Args:
        model: with everything resident.
        ids: tokens that it decodes in turn, each as a text of its own.
        store: its files are read.
        mode: how they are read.
        workers: threads that read.
        seconds: duration of each of the three; longer if passes take long.
    """
    tokens = itertools.cycle(torch.tensor([list(ids)]).split(1, dim=1))

    def decode() -> float:
        started_s = time.perf_counter()
        with torch.inference_mode():
            model(next(tokens), use_cache=False)
        return time.perf_counter() - started_s

    return contention(decode, partial(probe_read_bandwidth, store, REQUEST_BYTES, workers, mode), seconds)


def contention(
    decode: Callable[[], float], read: Callable[[float], ReadBandwidth], seconds: float = SECONDS
) -> Contention:
    """Measure the same of anything that computes and reads.

    Args:
        decode: runs one pass, and returns its seconds.
        read: reads for a number of seconds.
        seconds: duration of each of the three; longer if passes take long.
    """
    with ThreadPoolExecutor(1) as pool:
        seconds = max(seconds, FEWEST_PASSES * min(decode(), decode()))
        alone = [decode() for _ in _until(seconds)]
        reads = pool.submit(read, seconds)
        beside: list[float] = []
        while not reads.done() or not beside:
            beside.append(decode())
        alone += [decode() for _ in _until(seconds)]
    return Contention(max(1.0, median(beside) / median(alone)), reads.result().bytes_per_s)


def _until(seconds: float) -> Iterator[None]:
    """Yield until so many seconds have passed, and at least once: this thread may be kept from its core for longer."""
    end_s = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end_s:
        yield
