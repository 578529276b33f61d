"""Products that take less time than the model's own, with other bits: matrices are widened to fp32 first.

Many processors have no instructions for bf16 products. There, widening an expert's matrix to fp32, multiplying, and rounding
the result takes less time from a few rows on. The results differ from the exact ones in the last bit of some elements, because
sums are kept in fp32 in another order. On processors with such instructions nothing is widened.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from promoe.experts.kernels.gain import seconds_of
from promoe.experts.kernels.matrices import product
from promoe.experts.kernels.quantized import OUTPUTS, QuantizedMatrix
from promoe.stores.thread_memory import ThreadMemory
from promoe.transfer.rows import Row

# Numbers of rows that are tried. With more rows than the last, widening is a small part of the time.
ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 5
# Memory of a thread for the outputs of a matrix that are widened at once.
WIDENED_BYTES = 4 * 2**20

_WIDENED, _EXPANDED = ThreadMemory(), ThreadMemory()


@dataclass(slots=True)
class Difference:
    """How far products are from the exact ones: the first one by each matrix of each layer is computed both ways.

    Attributes:
        compared: elements that were compared.
        equal: elements with the same bits.
        largest: the largest difference, relative to the root mean square of the exact product.
        total: the sum of all differences, each relative to that.
    """

    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """The mean relative difference."""
        return self.total / max(1, self.compared)

    @property
    def share_equal(self) -> float:
        """The share of elements with the same bits."""
        return self.equal / max(1, self.compared)

    def add(self, found: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare one product with the exact one."""
        scale = exact.double().square().mean().sqrt().clamp_min(1e-300)
        errors = (found.double() - exact.double()).abs() / scale
        if not bool(errors.isfinite().all()):  # NaN in padding says nothing
            return
        self.compared += exact.numel()
        self.equal += int((found == exact).sum())
        self.largest = max(self.largest, float(errors.max()))
        self.total += float(errors.sum())


class FastProducts:
    """The products of one model, each in the way that takes least time on this processor.

    Attributes:
        difference: from the exact products, as far as they were compared.
    """

    def __init__(self) -> None:
        self.difference = Difference()
        self._compared: set[Hashable] = set()
        self._lock = threading.Lock()

    def multiply(self, kind: Hashable, x: torch.Tensor, matrix: Row, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply `x[P, in]` by `matrix` `[in, width]`; return `[P, width]` (`out`).

        Args:
            kind: whose matrix it is; the first product of each kind that is not exact is compared.
            x: in the model's dtype.
            matrix: an expert's matrix in any slot format.
            out: where the result goes.
        """
        rows_from = widened_from(matrix)
        if rows_from is None or len(x) < rows_from:
            return product(x, matrix, out)
        out = x.new_empty((len(x), matrix.shape[1])) if out is None else out
        multiply_widened(x, matrix, out)
        if kind not in self._compared:
            with self._lock:
                self._compared.add(kind)
                self.difference.add(out, product(x, matrix))
        return out

    @property
    def in_words(self) -> str:
        """What was used, and how far it is from the exact products."""
        found = self.difference
        if not found.compared:
            return "fast; no product took less time than the exact one"
        return (
            f"fast; {found.share_equal:.2%} of the elements of products have the exact bits, the others differ by up to "
            f"{found.largest:.2g} of the root mean square ({found.mean:.1g} on average)"
        )


def multiply_widened(x: torch.Tensor, matrix: Row, out: torch.Tensor) -> torch.Tensor:
    """Write `x[P, in]` times `matrix` `[in, width]` into `out[P, width]`, by products in fp32, and return it."""
    wide, start = x.float(), 0
    for factor in _factors(matrix):
        memory = _WIDENED.of((factor.shape[1], factor.shape[0]), torch.float32)
        memory.copy_(factor.t())
        out[:, start : start + factor.shape[1]] = wide @ memory.t()
        start += factor.shape[1]
    return out


def _factors(matrix: Row) -> Iterator[torch.Tensor]:
    """Yield the matrix as right factors `[in, some]` in the model's dtype, the next outputs at a time."""
    inputs = matrix.shape[0]
    size = max(OUTPUTS, WIDENED_BYTES // (4 * inputs) // OUTPUTS * OUTPUTS)
    if isinstance(matrix, torch.Tensor):
        yield from matrix.split(size, dim=1)
        return
    assert isinstance(matrix, QuantizedMatrix), type(matrix)
    for part, parts in matrix.format.split(matrix.parts, size):
        yield part.expand(parts, _EXPANDED)


def widened_from(matrix: Row) -> int | None:
    """Return the smallest of `ROWS` from which on widening this matrix takes less time; None: it never does.

    It is measured once per shape, format and number of threads, as the medians of alternating rounds.
    """
    if isinstance(matrix, torch.Tensor):
        if matrix.dtype == torch.float32 or matrix.device.type != "cpu":
            return None
        return _plain_from(tuple(matrix.shape), matrix.stride(), matrix.dtype, torch.get_num_threads())
    return _quantized_from(matrix.format, torch.get_num_threads()) if isinstance(matrix, QuantizedMatrix) else None


@cache
def _plain_from(shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype, num_threads: int) -> int | None:
    matrix = torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(_random(shape, num_threads))
    return _measured(matrix, dtype, num_threads)


@cache
def _quantized_from(matrix_format: Any, num_threads: int) -> int | None:
    matrix = matrix_format.view(matrix_format.pack(_random(matrix_format.shape, num_threads).to(matrix_format.dtype)))
    return _measured(matrix, matrix_format.dtype, num_threads)


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)


def _measured(matrix: Row, dtype: torch.dtype, num_threads: int) -> int | None:
    return next((num_rows for num_rows in ROWS if _speedup(matrix, dtype, num_rows, num_threads) > 1), None)


def _speedup(matrix: Row, dtype: torch.dtype, num_rows: int, seed: int) -> float:
    x = _random((num_rows, matrix.shape[0]), seed).to(dtype)
    out = x.new_empty((num_rows, matrix.shape[1]))
    rounds = [
        (seconds_of(partial(product, x, matrix, out)), seconds_of(partial(multiply_widened, x, matrix, out)))
        for _ in range(ROUNDS + 1)
    ]
    # The first round is left out, because libraries compile their kernels in it.
    return statistics.median(exact_s / widened_s for exact_s, widened_s in rounds[1:])
