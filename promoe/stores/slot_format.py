"""How the bytes of a matrix lie in a slot, where that is not how the model has them.

A store says so for each tensor (`TensorSpec.format`), the pool of slots hands out what the format makes of the bytes,
and kernels multiply by that. Formats themselves are kernels' knowledge (`promoe.experts.kernels.formats`).
"""

from __future__ import annotations

from typing import Protocol

import torch


class SlotMatrix(Protocol):
    """A matrix in a slot that is not a plain tensor. It reads its bytes each time it is used."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(in, out)`, as the right factor of a product."""
        ...

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x[P, in]` times the matrix, `[P, out]` (`out`), with the bits of `torch.mm` and `dense()` if exact."""
        ...

    def dense(self) -> torch.Tensor:
        """Return a copy of the matrix as the model has it."""
        ...


class MatrixFormat(Protocol):
    """How matrices of one shape lie in a slot. Hashable, and equal only where the same bytes are the same matrix."""

    def __hash__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix as the model has it."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether that is `[in, out]`; else `[out, in]`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements that the model has."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of a matrix in this format."""
        ...

    @property
    def name(self) -> str:
        """The slot format that this is, a key of `promoe.experts.kernels.formats.FORMATS`."""
        ...

    @property
    def signature(self) -> str:
        """Tells formats of one name apart in files: equal only where the same bytes are the same matrix."""
        ...

    @property
    def exact(self) -> bool:
        """Whether `dense()` is the matrix that was packed, bit by bit. If not, `multiply` may have other bits than it."""
        ...

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the bytes `[nbytes]`, uint8, of `matrix` in this format."""
        ...

    def view(self, memory: torch.Tensor) -> SlotMatrix:
        """Return the matrix that is, or will be, in `memory` `[nbytes]`, uint8, which stays the caller's."""
        ...
