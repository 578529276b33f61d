"""Which matrices a processor multiplies by sooner when they are packed. Not all: small ones take longer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from promoe.experts.kernels.packed import Packing
from promoe.experts.kernels.packed_store import Packings

# What is multiplied by, one matrix after the other: more than most caches hold, as experts are.
SPAN_BYTES, MOST_MATRICES = 128 * 2**20, 256
ROUNDS = 7
# Less is within what times differ by.
LEAST_GAIN = 1.05


def gaining(packings: Packings) -> Packings:
    """Of these, what is worth packing on this machine."""
    found = {
        layout: {name: packing for name, packing in of_layout.items() if gain_of(packing) >= LEAST_GAIN}
        for layout, of_layout in packings.items()
    }
    return {layout: of_layout for layout, of_layout in found.items() if of_layout}


def in_words(packings: Packings) -> str:
    """The gain of each, by tensor."""
    gains = {(name, gain_of(packing)) for of_layout in packings.values() for name, packing in of_layout.items()}
    return ", ".join(f"{name} {gain:.2f}" for name, gain in sorted(gains))


def gain_of(packing: Packing) -> float:
    """How many times as fast one token's row is multiplied by a packed matrix, measured: medians of rounds that take turns."""
    return _gain_of(packing, torch.get_num_threads())


@cache
def _gain_of(packing: Packing, num_threads: int) -> float:
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

    rounds = [(_seconds(multiply_plain), _seconds(multiply_packed)) for _ in range(ROUNDS + 1)]
    # The first round pays for what oneDNN makes.
    return statistics.median(plain_s / packed_s for plain_s, packed_s in rounds[1:])


def _seconds(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
