"""Weights that a checkpoint has in fewer bits stay so in slots: their codes are put where torch's kernels read them.

A checkpoint's codes lie in another order than a slot's: they are moved, not rounded. Scales and zeros are rounded to bf16,
which they are in already in some checkpoints. Where not, weights change by about as much as when they are rounded to bf16
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from promoe.experts.kernels.int4 import BLOCKS, GROUPS, Int4, kernel_block
from promoe.experts.kernels.int8 import Int8
from promoe.experts.kernels.quantized import EXPANDED_BYTES, Quantized, has_kernel
from promoe.stores.encodings.base import Integers
from promoe.stores.layer_plan import DecodedRows
from promoe.stores.layout import TensorSpec
from promoe.stores.thread_memory import ThreadMemory
from promoe.transfer.processor import multiplies_bfloat16

# With this many rows, a matrix is expanded for a product where the processor multiplies bf16. It is not measured, as it is
# for the files of `promoe quantize`: the output must not differ from one start to the next.
DENSE_FROM = 128
_DECODED = ThreadMemory()


@dataclass(frozen=True)
class Relay:
    """Makes a matrix in a slot format from what a checkpoint has of it (the `compute` of a chunk).

    Attributes:
        format: of the slot.
        rows: how the parts become the matrix's rows, from the first on.
        rounds: whether the codes differ from the checkpoint's: the matrix is decoded and quantised.
    """

    format: Int4 | Int8
    rows: tuple[DecodedRows, ...]
    rounds: bool

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the matrix into `out[nbytes]`, uint8, from the parts of all its rows."""
        if self.rounds:
            out.copy_(self.format.quantize(self._decoded(parts), "rtn"))
            return
        unpacked = [rows.decoding.encoding.unpack(some) for rows, some in self._by_rows(parts)]
        codes = _joined([codes for codes, _, _ in unpacked])
        scales = _joined([scales for _, scales, _ in unpacked])
        if isinstance(self.format, Int8):
            self.format.write(out, codes, scales.squeeze(1))
            return
        times = self.format.linear_shape[1] // self.format.group // scales.shape[1]
        has_zeros = any(zeros is not None for _, _, zeros in unpacked)
        # Some rows may be in an encoding that has zeros, and others in one that has none.
        zeros = _joined([torch.zeros_like(scales) if zeros is None else zeros for _, scales, zeros in unpacked])
        self.format.write(out, codes, _repeated(scales, times), _repeated(zeros, times) if has_zeros else None)

    def _by_rows(self, parts: Sequence[torch.Tensor]) -> Iterator[tuple[DecodedRows, Sequence[torch.Tensor]]]:
        start = 0
        for rows in self.rows:
            yield rows, parts[start : start + rows.num_parts]
            start += rows.num_parts

    def _decoded(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, dtype = self.format.shape, self.format.dtype
        small = math.prod(shape) * dtype.itemsize <= EXPANDED_BYTES
        matrix = _DECODED.of(shape, dtype) if small else torch.empty(shape, dtype=dtype, device="cpu")
        start = 0
        for rows, some in self._by_rows(parts):
            end = start + rows.decoding.shape[0]
            rows.decoding(some, matrix[start:end].view(-1))
            start = end
        return matrix


def relay_of(spec: TensorSpec, transposed: bool, rows: Sequence[DecodedRows], to_int8: bool) -> Relay | None:
    """Return how a matrix stays in fewer bits in slots; None: it has to be decoded.

    Args:
        spec: the matrix, plain.
        transposed: whether it is `[in, out]` instead of `[out, in]`.
        rows: what it is decoded from.
        to_int8: quantise it to 8 bits if its codes cannot be kept.
    """
    if not Quantized.can_hold(spec.shape, spec.dtype):
        return None
    kinds = {one.decoding.encoding.integers for one in rows}
    kept = kept_format(spec, transposed, kinds.pop() if len(kinds) == 1 else None)
    if kept is not None:
        return Relay(kept, tuple(rows), False)
    if not to_int8:
        return None
    return Relay(Int8((spec.shape[0], spec.shape[1]), transposed, _dense_from()), tuple(rows), True)


def kept_format(spec: TensorSpec, transposed: bool, integers: Integers | None) -> Int4 | Int8 | None:
    """Return the slot format in which a matrix keeps its codes; None: there is none.

    Args:
        spec: the matrix, plain.
        transposed: whether it is `[in, out]` instead of `[out, in]`.
        integers: what the checkpoint has it as.
    """
    if integers is None or transposed or not Quantized.can_hold(spec.shape, spec.dtype):
        return None
    shape = (spec.shape[0], spec.shape[1])
    if integers.bits == 4 and (group := _group(integers.group, shape[1])) and has_kernel(Int4):
        return Int4(shape, False, _dense_from(), 4, group, kernel_block() or BLOCKS[0])
    if integers.bits == 8 and integers.group is None and has_kernel(Int8):
        return Int8(shape, False, _dense_from())
    return None


def _dense_from() -> int | None:
    return DENSE_FROM if multiplies_bfloat16() else None


def _group(group: int | None, inputs: int) -> int | None:
    """Return the largest group of a slot that groups of the checkpoint consist of; None: there is none."""
    whole = inputs if group is None else group
    return next((size for size in reversed(GROUPS) if whole % size == 0 and inputs % whole == 0), None)


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))


def _repeated(scales: torch.Tensor, times: int) -> torch.Tensor:
    return scales if times == 1 else scales.repeat_interleave(times, dim=1)
