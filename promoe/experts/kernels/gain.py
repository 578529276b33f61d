"""Measure how much faster the CPU multiplies by a matrix in another format. With small matrices it may be slower."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from promoe.stores.slot_format import MatrixFormat

# The measurement cycles through matrices of this total size, which is more than most CPU caches hold, like experts.
SPAN_BYTES, MOST_MATRICES = 128 * 2**20, 256
ROUNDS = 7


def gain_of(matrix: MatrixFormat) -> float:
    """Return the speedup of one token's product in this format over the model's own format.

    It is measured once per number of threads, as the median ratio of alternating rounds.
    """
    return _gain_of(matrix, torch.get_num_threads())


@cache
def _gain_of(packing: MatrixFormat, num_threads: int) -> float:
    num_matrices = max(2, min(MOST_MATRICES, SPAN_BYTES // packing.nbytes))
    options: Any = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator().manual_seed(num_threads)}
    matrix = torch.randn(packing.shape, **options).to(packing.dtype)
    plain = [matrix.clone() if packing.transposed else matrix.clone().t() for _ in range(num_matrices)]
    memory = packing.pack(matrix)
    packed = [packing.view(memory.clone()) for _ in range(num_matrices)]
    in_size, out_size = packed[0].shape
    x = torch.randn((1, in_size), **options).to(packing.dtype)
    out = x.new_empty((1, out_size))

    def multiply_plain() -> None:
        for one in plain:
            torch.mm(x, one, out=out)

    def multiply_packed() -> None:
        for one in packed:
            one.multiply(x, out)

    rounds = [(seconds_of(multiply_plain), seconds_of(multiply_packed)) for _ in range(ROUNDS + 1)]
    # The first round is left out, because oneDNN compiles its kernels in it.
    return statistics.median(plain_s / packed_s for plain_s, packed_s in rounds[1:])


def seconds_of(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
