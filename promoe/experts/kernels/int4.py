"""The slot formats "int4", "int3" and "int2": groups of inputs share a scale and a zero.

In a slot: the codes, then scales and zeros `[in / group, out, 2]`, bf16. torch's kernel multiplies by codes of 4 bits. It
reads them in blocks of outputs, `[out / block, in, block / 2]`: a byte has output j of a block in its low bits, and
output j + block / 2 in its high bits. The block is 64 with AVX-512 and 32 with AVX2, so files belong to one of the two.
A device expands either.

3 and 2 bits are for those whose link is the limit. Their codes lie in planes. For each product they are put together and
moved to the middle of 4 bits: 0..7 become 4..11, and 0..3 become 6..9.

* Plane 1 has the low two bits of every code, in bytes half as many as those of 4 bits: the first half of these bytes is
  in bits 0, 1, 4 and 5, the second half in bits 2, 3, 6 and 7.
* Plane 2 (3 bits only) has the third bit of every code: quarter i of these bytes is in bits i and i + 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from promoe.experts.kernels.crossover import dense_from
from promoe.experts.kernels.quantization import METHODS, middle_code, quantize_groups
from promoe.experts.kernels.quantized import INPUTS, Quantized
from promoe.stores.layout import TensorSpec
from promoe.stores.thread_memory import ThreadMemory

BITS, GROUPS, BLOCKS = (4, 3, 2), (32, 64, 128), (64, 32)
DEFAULT_GROUP = 64
# The code that torch's kernel takes for the zero.
MIDDLE = middle_code(4)
# Of each 4-bit code in 8 bytes: the low two bits, and the lowest bit.
_LOW_TWO, _LOWEST = 0x3333333333333333, 0x1111111111111111

_CODES = ThreadMemory()


@dataclass(frozen=True)
class Int4(Quantized):
    """Matrices of one shape in 4, 3 or 2 bits.

    Attributes:
        bits: of a code.
        group: inputs that share a scale and a zero.
        block: outputs of a block.
    """

    bits: int
    group: int
    block: int

    @property
    def name(self) -> str:
        """See `MatrixFormat`."""
        return f"int{self.bits}"

    @classmethod
    def smallest(cls) -> Int4:
        """See `Quantized.smallest`."""
        return cls((128, 2 * INPUTS), False, None, 4, 32, kernel_block() or BLOCKS[0])

    @property
    def is_known(self) -> bool:
        """Whether this version can read matrices in this format."""
        numbers = (self.bits in BITS, self.group in GROUPS, self.block in BLOCKS)
        return super().is_known and all(numbers) and self.linear_shape[1] % self.group == 0

    @property
    def fits_processor(self) -> bool:
        """See `Quantized.fits_processor`: the block has to be the kernel's."""
        return kernel_block() in (None, self.block)

    @property
    def nbytes(self) -> int:
        """See `MatrixFormat`: `bits` for each weight, four bytes for each group."""
        outputs, inputs = self.linear_shape
        return self._code_bytes + outputs * (inputs // self.group) * 4

    @property
    def _code_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.bits // 8

    def quantize(self, matrix: torch.Tensor, method: str) -> torch.Tensor:
        """See `Quantized.quantize`."""
        found = quantize_groups(self.as_linear(matrix), self.bits, self.group, METHODS[method])
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.write(memory, found.codes, found.scales, found.zeros)
        return memory

    def write(
        self, memory: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> None:
        """Write a matrix into `memory[nbytes]`.

        Args:
            memory: uint8.
            codes: `[out, in]`, uint8.
            scales: `[out, in / group]`; rounded to bf16.
            zeros: like `scales`; None: all are zero.
        """
        packed, scales_and_zeros = self.parts(memory)
        in_blocks = _to_blocks(codes, self.block)
        packed.copy_(in_blocks if self.bits == 4 else _planes(in_blocks, self.bits))
        to_scales, to_zeros = scales_and_zeros.unbind(2)
        to_scales.copy_(scales.t())
        if zeros is None:
            to_zeros.zero_()
        else:
            to_zeros.copy_(zeros.t())

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the bytes of the codes, and scales and zeros `[..., in / group, out, 2]`."""
        outputs, inputs = self.linear_shape
        rest = memory[..., self._code_bytes :].view(torch.bfloat16).unflatten(-1, (inputs // self.group, outputs, 2))
        return memory[..., : self._code_bytes], rest

    def _in_blocks(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the codes in 4 bits, as torch's kernel reads them, `[..., out * in / 2]`."""
        if self.bits == 4:
            return codes
        whole = _CODES.of((*codes.shape[:-1], self.shape[0] * self.shape[1] // 2), torch.uint8, codes.device)
        return _from_planes(codes, self.bits, whole)

    def product(self, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See `Quantized.product`."""
        codes, scales_and_zeros = parts
        in_blocks = self._in_blocks(codes).view(self.linear_shape[0], -1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(x, in_blocks, self.group, scales_and_zeros)  # type: ignore[no-any-return]

    def expand(self, parts: tuple[torch.Tensor, ...], memory: ThreadMemory) -> torch.Tensor:
        """See `Quantized.expand`. Each weight is rounded once: `addcmul` computes in fp32."""
        codes, scales_and_zeros = parts
        outputs, inputs = self.linear_shape
        blocks, half = outputs // self.block, self.block // 2
        packed = self._in_blocks(codes).unflatten(-1, (blocks, inputs, half))
        factor = memory.of((*codes.shape[:-1], inputs, outputs), self.dtype, codes.device)
        low, high = factor.unflatten(-1, (blocks, 2, half)).unbind(-2)
        low.copy_((packed & 15).view(torch.int8).sub_(MIDDLE).transpose(-3, -2))
        high.copy_((packed >> 4).view(torch.int8).sub_(MIDDLE).transpose(-3, -2))
        by_group = factor.unflatten(-2, (-1, self.group))
        scales, zeros = (part.contiguous().unsqueeze(-2) for part in scales_and_zeros.unbind(-1))
        torch.addcmul(zeros, by_group, scales, out=by_group)
        return factor

    def split(self, parts: tuple[torch.Tensor, ...], size: int) -> Iterator[tuple[Int4, tuple[torch.Tensor, ...]]]:
        """See `Quantized.split`. The parts have codes of 4 bits."""
        codes, scales_and_zeros = parts
        of_outputs = self._in_blocks(codes).view(self.linear_shape[0], -1)
        for some, rest in zip(of_outputs.split(size), scales_and_zeros.split(size, dim=1), strict=True):
            yield self._with_outputs(len(some), bits=4), (some.flatten(), rest)


class Int4Format:
    """One of the slot formats "int4", "int3" and "int2".

    Args:
        bits: of a code.
        group: inputs that share a scale and a zero.
    """

    exact = False

    def __init__(self, bits: int, group: int = DEFAULT_GROUP) -> None:
        self.name = f"int{bits}"
        self.bits = bits
        self.group = group

    def of(self, matrix: TensorSpec, transposed: bool) -> Int4 | None:
        """Return the format of such matrices on this machine; None: they have to stay plain."""
        if not Int4.can_hold(matrix.shape, matrix.dtype):
            return None
        rows, columns = matrix.shape
        made = Int4((rows, columns), transposed, None, self.bits, self.group, kernel_block() or BLOCKS[0])
        return replace(made, dense_from=dense_from(made)) if made.is_known else None

    def read(self, matrix: TensorSpec, transposed: bool, signature: str) -> Int4 | None:
        """Return the format with this signature, of any processor; None: there is none for such matrices."""
        found = Int4.from_signature(signature, matrix.shape, transposed)
        return found if isinstance(found, Int4) and found.bits == self.bits else None


@cache
def kernel_block() -> int | None:
    """Return how many outputs are in a block of torch's kernel on this processor; None: it has no such kernel."""
    pattern = (torch.arange(128 * INPUTS, dtype=torch.int32, device="cpu") * 40503 >> 7) & 15
    pattern = pattern.view(128, INPUTS)
    try:
        found = torch.ops.aten._convert_weight_to_int4pack_for_cpu(pattern, 1).flatten()
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    for block in BLOCKS:
        if torch.equal(found, _to_blocks(pattern.to(torch.uint8), block)):
            return block
    return None


def _to_blocks(codes: torch.Tensor, block: int) -> torch.Tensor:
    """Return codes `[out, in]` of 4 bits, uint8, as torch's kernel reads them with this block, `[out * in / 2]`."""
    low, high = codes.view(-1, 2, block // 2, codes.shape[1]).unbind(1)
    return (low | (high << 4)).transpose(1, 2).flatten()


def _planes(in_blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 2 or 3 bits, which lie in 4 bits each, as planes."""
    words = in_blocks.view(torch.int64)
    first, second = (words & _LOW_TWO).chunk(2)
    planes = [first | (second << 2)]
    if bits == 3:
        plane = torch.zeros_like(words[: len(words) // 4])
        for quarter, part in enumerate(words.chunk(4)):
            plane |= ((part >> 2) & _LOWEST) << quarter
        planes.append(plane)
    return torch.cat(planes).view(torch.uint8)


def _from_planes(planes: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Undo `_planes`, and move the codes to the middle of 4 bits: write them into `out`, and return it."""
    words, plane = out.view(torch.int64), planes.view(torch.int64)
    half = words.shape[-1] // 2
    low_two, lowest = plane[..., :half], plane[..., half:]
    first, second = words.chunk(2, dim=-1)
    torch.bitwise_and(low_two, _LOW_TWO, out=first)
    torch.bitwise_and(low_two >> 2, _LOW_TWO, out=second)
    if bits == 3:
        for idx, quarter in enumerate(words.chunk(4, dim=-1)):
            quarter.bitwise_or_(((lowest >> idx) & _LOWEST) << 2)
    words.add_((MIDDLE - middle_code(bits)) * _LOWEST)
    return out
