"""An expert's matrices as oneDNN lays them out to multiply by them, in the memory of a slot.

For each product, oneDNN first brings a matrix from the model's layout into its own, which takes as long as a product with few
rows. Matrices that are in that layout already spare it that. The bits are the same wherever oneDNN adds in the same order,
which it is not trusted to do: for each number of rows, both ways are compared first (`PackedMatrix.multiply`). With AMX it
often does not: for many shapes from 33 rows on, and for some with one row already; those are not packed (`Packing.of`).

Comparing takes as long as some products. What few rows spare soon pays for that, many rows only after a while, and with very
many there is nothing to spare: until it pays, a matrix is brought back into the model's layout for each product. Long prompts,
of which nearly every expert has another number of rows, would spend more on comparing than on computing, and as much memory on
oneDNN's programs, otherwise.

The layout belongs to a processor, a version of oneDNN and a number of threads; `Packing.signature` tells one from another. What
is compared is multiplied in the layout that is there, whatever oneDNN would choose by now.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Larger ones stay as they are, for comparing takes some copies of a matrix; and so do what are hardly matrices.
MOST_BYTES, LEAST_SIZE = 64 * 2**20, 16
# Of what is compared: pairs of columns, and how many of these each row of the other factor uses; by what powers of two they
# are multiplied, and how far these range; rows of the matrix before they repeat; rows of the other factor, at least.
_PAIRS, _PAIRS_OF_ROW, _LEAST_POWER, _POWERS, _DRAWN, _LEAST_ROWS = 64, 32, 14, 6, 256, 8

# Up to so many rows the first product is compared already; up to so many the `LATER`th; with more, none is.
FEW_ROWS, MOST_ROWS = 16, 256
LATER = 16

# Outputs of a linear layer that oneDNN lays side by side, by twos of inputs: `[out / block, in / 2, block, 2]`.
BLOCKS = (64, 48, 32, 24, 16, 8)


class _Verdicts:
    """On products with matrices of one packing, with one number of threads."""

    def __init__(self) -> None:
        self.same: dict[int, bool] = {}
        """Number of rows -> whether the bits were the same."""
        self.uncompared: dict[int, int] = {}
        """Number of rows -> how many products there were that nothing was compared for."""
        self.most_rows = MOST_ROWS
        """With more, nothing is compared. Where many rows have other bits, more of them have, too."""

    def say_different(self, packing: Packing, num_rows: int) -> None:
        """Once, for there may be many such numbers of rows; and of one row, for then each token takes longer."""
        told = list(self.same.values()).count(False) > 1
        level = logging.WARNING if num_rows == 1 else logging.DEBUG if told else logging.INFO
        words = "one row has" if num_rows == 1 else f"{num_rows} rows have"
        logger.log(
            level,
            "With %d threads, %s other bits when multiplied by packed matrices of shape %s: they are unpacked for that, which "
            "takes time.",
            torch.get_num_threads(),
            words,
            list(packing.shape),
        )


_VERDICTS: defaultdict[tuple[Packing, int, bool], _Verdicts] = defaultdict(_Verdicts)
"""Of a packing, a number of threads, and whether torch uses oneDNN."""


class _Space(threading.local):
    """Of a thread, memory for one matrix at a time. malloc would put some of them into new memory each, for between two
    matrices it is asked for what oneDNN keeps."""

    _memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor, until the next one."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if nbytes > len(self._memory):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).view(shape)


_SPACE = _Space()


@dataclass(frozen=True)
class Packing:
    """How oneDNN lays out matrices of one shape.

    Attributes:
        shape: of the matrix as the model has it.
        transposed: whether that is `[in, out]`; else `[out, in]`.
        dtype: of its elements.
        block: one of `BLOCKS`.
        description: oneDNN's own, opaque.
    """

    shape: tuple[int, int]
    transposed: bool
    dtype: torch.dtype
    block: int
    description: bytes

    @classmethod
    def of(cls, shape: Sequence[int], transposed: bool, dtype: torch.dtype) -> Packing | None:
        """That of this machine; None where there is none, or none that is known (`BLOCKS`), or where one token's row has not
        the same bits: what would have to be unpacked for each token is better left as it is."""
        if len(shape) != 2 or dtype != torch.bfloat16 or not _library().complete:
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
        """Whether such matrices consist of whole blocks."""
        outputs, inputs = self._linear_shape
        return outputs % self.block == 0 and inputs % 2 == 0

    @property
    def signature(self) -> str:
        """Tells this layout from others: a checksum of a matrix packed in it."""
        return _signature(self)

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        """The bytes `[nbytes]` of a matrix, packed; aligned as torch aligns tensors, for elsewhere products take longer."""
        assert tuple(matrix.shape) == self.shape, (matrix.shape, self)
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        packed, plain = self._elements(memory, matrix.contiguous())
        packed.copy_(plain)
        return memory

    def unpack(self, memory: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What is packed in `memory` `[nbytes]` as the model has it, in `out`."""
        packed, plain = self._elements(memory, out)
        plain.copy_(packed)
        return out

    def _elements(self, memory: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both, in the same order. They are moved as numbers: what is no number has its bits, too."""
        outputs, inputs = self._linear_shape
        blocks, twos = outputs // self.block, inputs // 2
        if self.transposed:
            plain = matrix.view(torch.int16).view(twos, 2, blocks, self.block).permute(2, 0, 3, 1)
        else:  # two inputs as one number
            plain = matrix.view(torch.int32).view(blocks, self.block, twos).transpose(1, 2)
        return memory.view(plain.dtype).view(plain.shape), plain

    def view(self, memory: torch.Tensor) -> PackedMatrix:
        """What is, or will be, packed in `memory` `[nbytes]`, which stays the caller's; it is read when multiplied by."""
        assert memory.dtype == torch.uint8, memory.dtype
        assert memory.numel() == self.nbytes, (memory.shape, self)
        return PackedMatrix(self, _library().opaque(memory.data_ptr(), self._linear_shape, self.description), memory)

    @property
    def _linear_shape(self) -> tuple[int, int]:
        """`[out, in]`, as linear layers have it."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape


class PackedMatrix:
    """A packed matrix of an expert, in place of the tensor that it would be otherwise."""

    __slots__ = ("_memory", "_opaque", "packing")

    def __init__(self, packing: Packing, opaque: torch.Tensor, memory: torch.Tensor) -> None:
        self.packing = packing
        self._opaque = opaque
        self._memory = memory  # which `opaque` does not keep alive

    @property
    def shape(self) -> tuple[int, int]:
        """`[in, out]`, as the right factor of a product."""
        out_size, in_size = self.packing._linear_shape
        return in_size, out_size

    def dense(self) -> torch.Tensor:
        """A copy as the model has it."""
        packing = self.packing
        return packing.unpack(self._memory, torch.empty(packing.shape, dtype=packing.dtype, device="cpu"))

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`x[P, in]` times the matrix: `[P, out]` (`out`), with the bits of `torch.mm` and the model's layout."""
        if x.dtype == self.packing.dtype and x.is_contiguous() and _same_bits_known(self.packing, len(x)):
            found = self.multiply_packed(x)
            return found if out is None else out.copy_(found)
        packing = self.packing
        dense = packing.unpack(self._memory, _SPACE.of(packing.shape, packing.dtype))
        if out is None:
            out = x.new_empty((len(x), self.shape[1]))
        return torch.mm(x, dense if packing.transposed else dense.t(), out=out)

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """The same as it is packed, with whatever bits that has."""
        return torch.ops.mkldnn._linear_pointwise(x, self._opaque, None, "none", [], "")  # type: ignore[no-any-return]


def _verdicts_on(packing: Packing) -> _Verdicts:
    """As things are now: torch.backends.mkldnn.flags may switch oneDNN off."""
    return _VERDICTS[packing, torch.get_num_threads(), torch._C._get_mkldnn_enabled()]


def _one_row_has_the_same_bits(packing: Packing) -> bool:
    verdicts = _verdicts_on(packing)
    if 1 not in verdicts.same:
        verdicts.same[1] = _compare(packing, 1)
    return verdicts.same[1]


def _same_bits_known(packing: Packing, num_rows: int) -> bool:
    """Whether products of so many rows are known to have the same bits; it is found out once that pays."""
    verdicts = _verdicts_on(packing)
    if num_rows > verdicts.most_rows or not num_rows:
        return False
    same = verdicts.same.get(num_rows)
    if same is not None:
        return same
    if num_rows > FEW_ROWS:
        uncompared = verdicts.uncompared[num_rows] = verdicts.uncompared.get(num_rows, 0) + 1
        if uncompared < LATER:
            return False
    same = verdicts.same[num_rows] = _compare(packing, num_rows)
    if not same:
        if num_rows > FEW_ROWS:
            verdicts.most_rows = num_rows - 1
        verdicts.say_different(packing, num_rows)
    return same


def _compare(packing: Packing, num_rows: int) -> bool:
    """Whether a product of `num_rows` has the same bits either way, whatever is multiplied.

    Pairs of columns are alike, and are multiplied by large numbers of opposite signs: what is added between them loses its last
    bits and what is added elsewhere does not, so that another order of additions shows in many elements. Some pairs lie at the
    ends, so that what is added up apart there shows, too. One row is enough to tell the orders
    that `tests/experts/kernels/test_packed.py` has.
    """
    generator = torch.Generator().manual_seed(num_rows)
    for _ in range(max(1, _LEAST_ROWS // num_rows)):
        x, linear = _telling(packing, num_rows, generator)
        matrix = linear.t().contiguous() if packing.transposed else linear
        plain = torch.mm(x, matrix if packing.transposed else matrix.t())
        if not torch.equal(plain, packing.view(packing.pack(matrix)).multiply_packed(x)):
            return False
    return True


def _telling(packing: Packing, num_rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors `[num_rows, in]` and `[out, in]` whose product depends on the order of additions."""
    outputs, width = packing._linear_shape
    num_pairs = min(_PAIRS, width // 4)
    columns = torch.arange(width, dtype=torch.float32, device="cpu")
    from_end = torch.minimum(columns, columns.flip(0)) + 1.0
    # As many anywhere as near the ends, there as many from 1 to 2 columns away as from 2 to 4, and so on.
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


def _reorder(linear: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(linear, 1)  # type: ignore[no-any-return]


def _bytes_of(opaque: torch.Tensor) -> torch.Tensor:
    """A copy `[nbytes]`."""
    ops: Any = torch.ops.mkldnn
    nbytes = int(ops._nbytes(opaque))
    copy = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    ctypes.memmove(copy.data_ptr(), int(ops.data_ptr(opaque)), nbytes)
    return copy


@cache
def _packing(shape: tuple[int, int], transposed: bool, dtype: torch.dtype, num_threads: int) -> Packing | None:
    assert num_threads == torch.get_num_threads(), "oneDNN goes by it"
    pattern = _pattern(shape).view(dtype)
    try:
        packed = _reorder(pattern.t().contiguous() if transposed else pattern)
        description = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
        content = _bytes_of(packed)
    except (RuntimeError, AttributeError) as error:  # a processor, or a build of torch, without
        logger.debug("no packing for %s: %s", shape, error)
        return None
    for block in BLOCKS:
        found = Packing(shape, transposed, dtype, block, description)
        if found.fits and len(content) == found.nbytes and torch.equal(found.pack(pattern), content):
            return found
    logger.debug("a packing for %s that is not known", shape)
    return None


def _pattern(shape: tuple[int, int]) -> torch.Tensor:
    """`shape`, int16: no row is like another and no column, so that another order of either is another checksum."""
    number = torch.arange(shape[0] * shape[1], dtype=torch.int32, device="cpu")
    # The first term comes again after 2**16 elements, which can be a whole number of rows; the second is another then.
    return ((number * 40503) ^ ((number >> 16) * 30011)).to(torch.int16).view(shape)


@cache
def _signature(packing: Packing) -> str:
    pattern = _pattern(packing.shape).view(packing.dtype)
    return hashlib.sha256(packing.pack(pattern).numpy().data).hexdigest()


class _Library:
    """What of torch's C interface makes an opaque tensor over memory that is there already."""

    def __init__(self) -> None:
        self.complete = False
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            self._create = library.aoti_torch_create_tensor_from_blob_v2
            self._cpu = library.aoti_torch_device_type_cpu()
            self._dtypes = {torch.bfloat16: library.aoti_torch_dtype_bfloat16()}
            self._layout = library.aoti_torch_layout__mkldnn()
            self._steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
            ops: Any = torch.ops.mkldnn
            for name in (
                "_reorder_linear_weight",
                "_linear_pointwise",
                "_get_mkldnn_serialized_md",
                "data_ptr",
                "_nbytes",
            ):
                getattr(ops, name)
        except (OSError, AttributeError) as error:
            logger.debug("no opaque tensors over memory: %s", error)
            return
        self._capsule = ctypes.pythonapi.PyCapsule_New
        self._capsule.restype = ctypes.py_object
        self._capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.complete = torch.backends.mkldnn.is_available()

    def opaque(self, address: int, shape: tuple[int, int], description: bytes) -> torch.Tensor:
        """A tensor in oneDNN's layout at `address`; the memory is not kept."""
        handle = ctypes.c_void_p()
        sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
        failed = self._create(
            ctypes.c_void_p(address),
            ctypes.c_int64(2),
            sizes,
            strides,
            ctypes.c_int64(0),
            ctypes.c_int32(self._dtypes[torch.bfloat16]),
            ctypes.c_int32(self._cpu),
            ctypes.c_int32(0),
            ctypes.byref(handle),
            ctypes.c_int32(self._layout),
            description,
            ctypes.c_int64(len(description)),
        )
        if failed:
            raise RuntimeError(f"torch made no opaque tensor of shape {shape} (error {failed})")
        with torch.inference_mode(False):
            return self._steal(self._capsule(handle.value, None, None))


@cache
def _library() -> _Library:
    return _Library()
