"""What the slot formats in fewer bits have in common: matrices stay quantised in slots and are multiplied there.

A product with few rows reads the codes, by a kernel of torch. A product with many rows is faster if the matrix is
expanded to bf16 first, because bf16 products have their own instructions on many processors. The two have different
bits, so the number of rows that decides (`dense_from`) is part of the format and of its files: the output never depends
on which experts are in memory.

On a CPU, the reference of a quantised model is the same model with all its experts in slots. It is not the model whose
weights are expanded to bf16: torch's kernels do not round the weights to bf16 before they multiply.

On a device, the reference is the model whose weights are expanded to bf16 (`QuantizedMatrix.dense`). Slots hold the
codes there, too, but the stock kernels multiply by expanded copies (`expanding`). Expanding gives the same bits on every
device: the product of a code and a scale is exact in fp32, and what is added to it is rounded alike everywhere.
"""

from __future__ import annotations

import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from promoe.files import loads
from promoe.stores.thread_memory import ThreadMemory

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

# torch's kernels load whole vectors of AVX-512: inputs and outputs must be multiples of these.
INPUTS, OUTPUTS = 64, 64

# Memory of a thread for expanded weights. A larger matrix is expanded some outputs at a time.
EXPANDED_BYTES = 32 * 2**20

_DENSE = ThreadMemory()


@dataclass(frozen=True)
class Quantized(ABC):
    """A slot format in fewer bits (a `MatrixFormat`), for matrices of one shape.

    Attributes:
        shape: see `MatrixFormat`.
        transposed: see `MatrixFormat`.
        dense_from: with at least this many rows, the matrix is expanded for a product; None: with no number of rows.
    """

    shape: tuple[int, int]
    transposed: bool
    dense_from: int | None

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    exact: ClassVar[bool] = False

    @staticmethod
    def can_hold(shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether matrices of this shape and dtype can be quantised."""
        return (
            len(shape) == 2
            and dtype == torch.bfloat16
            and all(size % INPUTS == 0 and size % OUTPUTS == 0 and size > 0 for size in shape)
        )

    @property
    def linear_shape(self) -> tuple[int, int]:
        """`(out, in)`, as linear layers have it."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape

    @property
    def signature(self) -> str:
        """The format as JSON, which `from_signature` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_signature(cls, signature: str, shape: tuple[int, ...], transposed: bool) -> Quantized | None:
        """Return the format that has this signature; None: there is none for such matrices."""
        try:
            fields = loads(signature.encode())
            found = cls(**{**fields, "shape": tuple(fields["shape"])})
        except (ValueError, TypeError, KeyError):
            return None
        rows = found.dense_from
        is_sound = rows is None or (isinstance(rows, int) and rows > 0)
        same = found.shape == tuple(shape) and found.transposed == transposed
        return found if same and is_sound and found.is_known else None

    @property
    def is_known(self) -> bool:
        """Whether this version can read matrices in this format."""
        return self.can_hold(self.shape, self.dtype)

    @property
    def fits_processor(self) -> bool:
        """Whether this processor can multiply by matrices in this format. A device expands them in any case."""
        return True

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight, with its share of scales and zeros."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        """See `MatrixFormat.pack`. Rounds to nearest."""
        return self.quantize(matrix, "rtn")

    def view(self, memory: torch.Tensor) -> QuantizedMatrix:
        """See `MatrixFormat.view`."""
        assert memory.dtype == torch.uint8, memory.dtype
        assert memory.numel() == self.nbytes, (memory.shape, self)
        return QuantizedMatrix(self, self.parts(memory))

    def dense(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return a copy of the matrix, expanded to bf16, as the model has it: `[..., *shape]`, on the device of `parts`."""
        factor = self.expand(parts, _DENSE)
        return (factor if self.transposed else factor.mT).clone(memory_format=torch.contiguous_format)

    def as_linear(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a view of `matrix`, as the model has it, as `[out, in]`."""
        assert tuple(matrix.shape) == self.shape, (matrix.shape, self)
        return matrix.t() if self.transposed else matrix

    @classmethod
    @abstractmethod
    def smallest(cls) -> Quantized:
        """Return the format of a matrix with few elements but several blocks, to try the kernel with."""

    @property
    @abstractmethod
    def name(self) -> str:
        """See `MatrixFormat`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """See `MatrixFormat`: codes, scales and zeros."""

    @abstractmethod
    def quantize(self, matrix: torch.Tensor, method: str) -> torch.Tensor:
        """Return the bytes `[nbytes]` of `matrix`, as the model has it, quantised by a method of `quantization.METHODS`.

        Raises:
            CheckpointError: it has NaN or infinity.
        """

    @abstractmethod
    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of codes, scales and zeros in `memory[..., nbytes]`, as `dense` and the methods below take them."""

    @abstractmethod
    def product(self, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return `x[P, in]`, bf16 and contiguous, times the matrix, by torch's kernel."""

    @abstractmethod
    def expand(self, parts: tuple[torch.Tensor, ...], memory: ThreadMemory) -> torch.Tensor:
        """Return the matrix in bf16 as the right factor `[..., in, out]`, in `memory`, on the device of `parts`.

        The bits are the same on every device.
        """

    @abstractmethod
    def split(self, parts: tuple[torch.Tensor, ...], size: int) -> Iterator[tuple[Quantized, tuple[torch.Tensor, ...]]]:
        """Yield format and parts of the next `size` outputs (a multiple of `OUTPUTS`), or of those that are left."""

    def _with_outputs(self, count: int, **changes: Any) -> Self:
        inputs = self.linear_shape[1]
        return replace(self, shape=(inputs, count) if self.transposed else (count, inputs), **changes)

    @property
    def outputs_at_once(self) -> int:
        """How many outputs are expanded at a time for a product."""
        return max(OUTPUTS, EXPANDED_BYTES // (self.linear_shape[1] * self.dtype.itemsize) // OUTPUTS * OUTPUTS)


class QuantizedMatrix:
    """A quantised matrix of an expert (a `SlotMatrix`)."""

    __slots__ = ("_dense_from", "format", "parts")

    def __init__(self, matrix_format: Quantized, parts: tuple[torch.Tensor, ...]) -> None:
        self.format = matrix_format
        self.parts = parts
        rows = matrix_format.dense_from
        self._dense_from = 1 if not has_kernel(type(matrix_format)) else sys.maxsize if rows is None else rows

    @property
    def shape(self) -> tuple[int, int]:
        """`(in, out)`, as the right factor of a product."""
        out_size, in_size = self.format.linear_shape
        return in_size, out_size

    def dense(self) -> torch.Tensor:
        """Return a copy of the matrix, expanded to bf16, as the model has it."""
        return self.format.dense(self.parts)

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x[P, in]` times the matrix, `[P, out]` (`out`)."""
        if 0 < len(x) < self._dense_from and x.dtype == torch.bfloat16:
            found = self.format.product(x.contiguous(), self.parts)
            return found if out is None else out.copy_(found)
        return self.multiply_expanded(x, out)

    def multiply_expanded(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Do the same after expanding the matrix to bf16."""
        if out is None:
            out = x.new_empty((len(x), self.shape[1]))
        size = self.format.outputs_at_once
        if size >= self.shape[1]:
            return torch.mm(x, self.format.expand(self.parts, _DENSE), out=out)
        for (part, parts), columns in zip(self.format.split(self.parts, size), out.split(size, dim=1), strict=True):
            torch.mm(x, part.expand(parts, _DENSE), out=columns)
        return out


@cache
def has_kernel(kind: type[Quantized]) -> bool:
    """Return whether this build of torch has the kernel of a format, and it computes what the format expects.

    The kernels are not part of torch's public interface, so each is tried once on a small matrix.
    """
    small = kind.smallest()
    out_size, in_size = small.linear_shape
    options: Any = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator().manual_seed(0)}
    x = torch.randn((3, in_size), **options).to(torch.bfloat16)
    parts = small.parts(small.pack(torch.randn((out_size, in_size), **options).to(torch.bfloat16)))
    try:
        found = small.product(x, parts).float()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.warning("This build of torch has no product by %s matrices, so they are expanded: %s", small.name, error)
        return False
    expected = x.float() @ small.expand(parts, ThreadMemory()).float()
    if not torch.allclose(found, expected, rtol=0.02, atol=0.2):
        logger.warning("torch reads %s matrices in another layout on this machine, so they are expanded.", small.name)
        return False
    return True
