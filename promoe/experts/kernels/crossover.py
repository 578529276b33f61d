"""Measure from how many rows on a quantised matrix should be expanded for a product."""

from __future__ import annotations

import statistics
from functools import cache, partial
from typing import Any

import torch

from promoe.experts.kernels.gain import seconds_of
from promoe.experts.kernels.quantized import Quantized, has_kernel

# Numbers of rows that are tried. With fewer rows than the first, expanding takes longer than any product.
ROWS = (8, 16, 32, 64, 128, 256, 512)
ROUNDS = 5


def dense_from(matrix_format: Quantized) -> int | None:
    """Return the smallest of `ROWS` from which on expanding is faster; None: it never is.

    It is measured once per format and number of threads, as the medians of alternating rounds.
    """
    return _dense_from(matrix_format, torch.get_num_threads())


@cache
def _dense_from(matrix_format: Quantized, num_threads: int) -> int | None:
    if not has_kernel(type(matrix_format)):
        return None
    out_size, in_size = matrix_format.linear_shape
    options: Any = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator().manual_seed(num_threads)}
    matrix = matrix_format.view(matrix_format.pack(torch.randn(matrix_format.shape, **options).to(torch.bfloat16)))
    found = None
    for num_rows in reversed(ROWS):
        x = torch.randn((num_rows, in_size), **options).to(torch.bfloat16)
        out = x.new_empty((num_rows, out_size))
        rounds = [
            (
                seconds_of(partial(matrix_format.product, x, matrix.parts)),
                seconds_of(partial(matrix.multiply_expanded, x, out)),
            )
            for _ in range(ROUNDS + 1)
        ]
        # The first round is left out, because oneDNN compiles its kernels in it.
        if statistics.median(quantized_s / expanded_s for quantized_s, expanded_s in rounds[1:]) <= 1:
            break
        found = num_rows
    return found
