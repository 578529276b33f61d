"""The slot format "packed": an expert's matrices in the layout in which oneDNN multiplies by them.

For each product, oneDNN first copies a matrix from the model's layout into its own, which takes as long as a product
with few rows. A packed matrix is in that layout already. The bits are the same wherever oneDNN adds in the same order.
That is not taken for granted: for each number of rows, both products are compared first (`PackedMatrix.multiply`). With
AMX they often differ: for many shapes from 33 rows on, and for some with one row already; those are not packed
(`Packing.of`).

A comparison takes as long as several products. With few rows it soon pays, with many rows only after a while, and with
very many rows packing saves nothing. Until it pays, a matrix is unpacked for each product. Otherwise long prompts, in
which nearly every expert has another number of rows, would spend more time on comparing than on computing, and as much
memory on oneDNN's programs.

The layout belongs to a processor, a version of oneDNN and a number of threads; `Packing.signature` tells layouts apart.
A packed matrix is multiplied, and compared, in the layout that it has, whatever layout oneDNN would choose by now.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeAlias

import torch

from promoe.experts.kernels.onednn import bytes_of, library, reorder
from promoe.experts.kernels.proofs import proof_of
from promoe.stores.layout import TensorSpec
from promoe.stores.thread_memory import ThreadMemory

logger = logging.getLogger(__name__)

# Larger matrices are not packed, because a comparison needs several copies of one. Very narrow ones are not packed
# either.
MOST_BYTES, LEAST_SIZE = 64 * 2**20, 16
# The factors of a comparison: the number of pairs of equal columns, and how many of them each row of the other factor
# uses; the smallest power of two that they are multiplied by, and the number of powers; the number of different rows of
# the matrix; the smallest number of rows of the other factor.
_PAIRS, _PAIRS_OF_ROW, _LEAST_POWER, _POWERS, _DRAWN, _LEAST_ROWS = 64, 32, 14, 6, 256, 8

# With up to FEW_ROWS rows, the first product is compared. With up to MOST_ROWS, the comparison waits for this many
# products. With more rows, nothing is compared.
FEW_ROWS, MOST_ROWS = 16, 256
PRODUCTS_BEFORE_COMPARING = 16

# How many outputs of a linear layer oneDNN may put into a block. The layout is `[out / block, in / 2, block, 2]`.
BLOCKS = (64, 48, 32, 24, 16, 8)


@dataclass(slots=True)
class _Products:
    """What is known of products with matrices of one packing under torch's present settings."""

    uncompared: dict[int, int] = field(default_factory=dict)
    """Number of rows -> number of products with that many rows that were not compared."""
    most_rows: int = MOST_ROWS
    """With more rows than this, nothing is compared. If many rows have other bits, so have more rows."""
    num_different: int = 0
    """How many numbers of rows had other bits."""


# Per packing, number of threads, and whether torch uses oneDNN: torch.backends.mkldnn.flags may switch it off.
_Key: TypeAlias = "tuple[Packing, int, bool]"
_PRODUCTS: defaultdict[_Key, _Products] = defaultdict(_Products)


class PackedFormat:
    """The slot format "packed": matrices in oneDNN's layout for this processor."""

    name = "packed"
    exact = True

    def of(self, matrix: TensorSpec, transposed: bool) -> Packing | None:
        """Return the packing of such matrices on this machine; None: they cannot be packed."""
        return Packing.of(matrix.shape, transposed, matrix.dtype)

    def read(self, matrix: TensorSpec, transposed: bool, signature: str) -> Packing | None:
        """Return the packing that has this signature; None: such matrices would be packed otherwise on this machine."""
        found = self.of(matrix, transposed)
        return found if found is not None and found.signature == signature else None


_MEMORY = ThreadMemory()


@dataclass(frozen=True)
class Packing:
    """The layout of matrices of one shape in oneDNN.

    Attributes:
        shape: see `MatrixFormat`.
        transposed: see `MatrixFormat`.
        dtype: see `MatrixFormat`.
        block: one of `BLOCKS`.
        description: oneDNN's own binary description of the layout.
    """

    shape: tuple[int, int]
    transposed: bool
    dtype: torch.dtype
    block: int
    description: bytes

    name: ClassVar[str] = "packed"
    exact: ClassVar[bool] = True

    @classmethod
    def of(cls, shape: Sequence[int], transposed: bool, dtype: torch.dtype) -> Packing | None:
        """Return the layout of such matrices on this machine; None: they should stay plain.

        They should if oneDNN has no layout of its own or an unknown one (see `BLOCKS`), or if one token's row has other
        bits, because the matrix would then be unpacked for each token.
        """
        if len(shape) != 2 or dtype != torch.bfloat16 or not library().complete:
            return None
        rows, columns = shape
        if rows * columns * dtype.itemsize > MOST_BYTES or min(shape) < LEAST_SIZE:
            return None
        found = _packing((rows, columns), transposed, dtype, torch.get_num_threads())
        return found if found is not None and _one_row_has_the_same_bits(found) else None

    @property
    def nbytes(self) -> int:
        """Bytes of a matrix, packed or not."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def fits(self) -> bool:
        """Whether matrices of this shape consist of whole blocks."""
        outputs, inputs = self._linear_shape
        return outputs % self.block == 0 and inputs % 2 == 0

    @property
    def signature(self) -> str:
        """A checksum of a known matrix in this layout."""
        return _signature(self)

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the bytes `[nbytes]` of a packed matrix, aligned like torch's tensors: otherwise products take longer."""
        assert tuple(matrix.shape) == self.shape, (matrix.shape, self)
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        packed, plain = self._elements(memory, matrix.contiguous())
        packed.copy_(plain)
        return memory

    def unpack(self, memory: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the matrix that is packed in `memory` `[nbytes]` into `out`, as the model has it, and return that."""
        packed, plain = self._elements(memory, out)
        plain.copy_(packed)
        return out

    def _elements(self, memory: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of both, in the same order, as integers: NaN keeps its bits that way."""
        outputs, inputs = self._linear_shape
        blocks, twos = outputs // self.block, inputs // 2
        if self.transposed:
            plain = matrix.view(torch.int16).view(twos, 2, blocks, self.block).permute(2, 0, 3, 1)
        else:  # read two inputs of 16 bits as one number
            plain = matrix.view(torch.int32).view(blocks, self.block, twos).transpose(1, 2)
        return memory.view(plain.dtype).view(plain.shape), plain

    def view(self, memory: torch.Tensor) -> PackedMatrix:
        """See `MatrixFormat.view`. The memory is read at each product."""
        assert memory.dtype == torch.uint8, memory.dtype
        assert memory.numel() == self.nbytes, (memory.shape, self)
        return PackedMatrix(self, library().opaque(memory.data_ptr(), self._linear_shape, self.description), memory)

    @property
    def _linear_shape(self) -> tuple[int, int]:
        """`(out, in)`, as linear layers have it."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape


class PackedMatrix:
    """A packed matrix of an expert (a `SlotMatrix`)."""

    __slots__ = ("_memory", "_opaque", "packing")

    def __init__(self, packing: Packing, opaque: torch.Tensor, memory: torch.Tensor) -> None:
        self.packing = packing
        self._opaque = opaque
        self._memory = memory  # `opaque` does not keep it alive

    @property
    def shape(self) -> tuple[int, int]:
        """`(in, out)`, as the right factor of a product."""
        out_size, in_size = self.packing._linear_shape
        return in_size, out_size

    def dense(self) -> torch.Tensor:
        """Return a copy of the matrix in the model's format."""
        packing = self.packing
        return packing.unpack(self._memory, torch.empty(packing.shape, dtype=packing.dtype, device="cpu"))

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x[P, in]` times the matrix, `[P, out]` (`out`), with the bits of `torch.mm` and the model's layout."""
        if x.dtype == self.packing.dtype and x.is_contiguous() and _same_bits_known(self.packing, len(x)):
            found = self.multiply_packed(x)
            return found if out is None else out.copy_(found)
        packing = self.packing
        dense = packing.unpack(self._memory, _MEMORY.of(packing.shape, packing.dtype))
        if out is None:
            out = x.new_empty((len(x), self.shape[1]))
        return torch.mm(x, dense if packing.transposed else dense.t(), out=out)

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return oneDNN's product in this layout, even if its bits differ."""
        return torch.ops.mkldnn._linear_pointwise(x, self._opaque, None, "none", [], "")  # type: ignore[no-any-return]


def _key_of(packing: Packing) -> _Key:
    return packing, torch.get_num_threads(), torch._C._get_mkldnn_enabled()


def _one_row_has_the_same_bits(packing: Packing) -> bool:
    proof = proof_of((*_key_of(packing), 1))
    return proof.keep(_compare(packing, 1)) if proof.same is None else proof.same


def _same_bits_known(packing: Packing, num_rows: int) -> bool:
    """Return whether products of `num_rows` rows are known to have the same bits. Compare them first once that pays."""
    key = _key_of(packing)
    products = _PRODUCTS[key]
    if num_rows > products.most_rows or not num_rows:
        return False
    proof = proof_of((*key, num_rows))
    if proof.same is not None:
        return proof.same
    if num_rows > FEW_ROWS:
        uncompared = products.uncompared[num_rows] = products.uncompared.get(num_rows, 0) + 1
        if uncompared < PRODUCTS_BEFORE_COMPARING:
            return False
    if not proof.keep(_compare(packing, num_rows)):
        if num_rows > FEW_ROWS:
            products.most_rows = num_rows - 1
        products.num_different += 1
        _log_different(packing, num_rows, products.num_different)
        return False
    return True


def _log_different(packing: Packing, num_rows: int, num_different: int) -> None:
    # There may be many such numbers of rows, so only the first one is logged at INFO. One row is a warning, because
    # every token takes longer then.
    level = logging.WARNING if num_rows == 1 else logging.DEBUG if num_different > 1 else logging.INFO
    words = "one row has" if num_rows == 1 else f"{num_rows} rows have"
    logger.log(
        level,
        "With %d threads, %s other bits when multiplied by packed matrices of shape %s: they are unpacked for that, which "
        "takes time.",
        torch.get_num_threads(),
        words,
        list(packing.shape),
    )


def _compare(packing: Packing, num_rows: int) -> bool:
    """Return whether a product of `num_rows` has the same bits in both layouts, whatever is multiplied.

    The factors make every other order of additions give another result. Pairs of columns are equal, and are multiplied
    by large numbers of opposite sign: numbers that are added between the two lose their last bits, and numbers that are
    added elsewhere do not. Some pairs lie near the ends, so that a separate sum there is noticed as well.
    `tests/experts/kernels/test_packed.py` has nine orders that one row is enough to tell apart.
    """
    generator = torch.Generator().manual_seed(num_rows)
    for _ in range(max(1, _LEAST_ROWS // num_rows)):
        x, linear = _order_revealing_factors(packing, num_rows, generator)
        matrix = linear.t().contiguous() if packing.transposed else linear
        plain = torch.mm(x, matrix if packing.transposed else matrix.t())
        if not torch.equal(plain, packing.view(packing.pack(matrix)).multiply_packed(x)):
            return False
    return True


def _order_revealing_factors(
    packing: Packing, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors `[num_rows, in]` and `[out, in]` whose product depends on the order of additions."""
    outputs, width = packing._linear_shape
    num_pairs = min(_PAIRS, width // 4)
    columns = torch.arange(width, dtype=torch.float32, device="cpu")
    from_end = torch.minimum(columns, columns.flip(0)) + 1.0
    # About half of the columns are drawn near the ends: as many at distances of 1 to 2 as of 2 to 4, and so on. The
    # others are drawn anywhere.
    chances = 1.0 / from_end + 2.0 * math.log(width) / width
    first, second = torch.multinomial(chances, 2 * num_pairs, generator=generator).view(2, num_pairs)

    options: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    linear = torch.randn((min(outputs, _DRAWN), width), **options)
    linear[:, second] = linear[:, first]
    linear = linear.to(packing.dtype).repeat(-(-outputs // len(linear)), 1)[:outputs].contiguous()
    x = torch.randn((num_rows, width), **options)
    for row in x:
        pairs = torch.rand(num_pairs, **options).argsort()[:_PAIRS_OF_ROW]
        large = 2.0 ** (_LEAST_POWER + _POWERS * torch.rand(len(pairs), **options)).round()
        row[first[pairs]], row[second[pairs]] = large, -large
    return x.to(packing.dtype), linear


@cache
def _packing(shape: tuple[int, int], transposed: bool, dtype: torch.dtype, num_threads: int) -> Packing | None:
    assert num_threads == torch.get_num_threads(), "oneDNN's layout depends on it"
    pattern = _pattern(shape).view(dtype)
    try:
        packed = reorder(pattern.t().contiguous() if transposed else pattern)
        description = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
        content = bytes_of(packed)
    except (RuntimeError, AttributeError) as error:  # this CPU or build of torch does not support it
        logger.debug("no packing for %s: %s", shape, error)
        return None
    for block in BLOCKS:
        found = Packing(shape, transposed, dtype, block, description)
        if found.fits and len(content) == found.nbytes and torch.equal(found.pack(pattern), content):
            return found
    logger.debug("the packing for %s is unknown", shape)
    return None


def _pattern(shape: tuple[int, int]) -> torch.Tensor:
    """Return int16 numbers with no two equal rows or columns, so that any other order has another checksum."""
    number = torch.arange(shape[0] * shape[1], dtype=torch.int32, device="cpu")
    # The first term repeats after 2**16 elements, which can be a whole number of rows. The second term differs by then.
    return ((number * 40503) ^ ((number >> 16) * 30011)).to(torch.int16).view(shape)


@cache
def _signature(packing: Packing) -> str:
    pattern = _pattern(packing.shape).view(packing.dtype)
    return hashlib.sha256(packing.pack(pattern).numpy().data).hexdigest()
