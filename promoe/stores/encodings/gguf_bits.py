"""What decoders of GGUF blocks share: memory, fields of bits, scales, and tables of levels.

Values are integer codes times scales. Their products are exact in float32, because they have at most 22 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from promoe.stores.thread_memory import ThreadMemory

_PACKED = ThreadMemory()
# The bits of each byte, as the eight bytes of an int64.
_BITS = torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu") & 1
BITS_OF_BYTES = _BITS.to(torch.uint8).view(torch.int64).flatten()


def half(blocks: torch.Tensor, offset: int, count: int = 1) -> torch.Tensor:
    """Return the fp16 numbers that begin at a byte of each block, as float32 `[n, count]`."""
    # A copy is aligned, wherever the blocks are.
    numbers = blocks[:, offset : offset + 2 * count].clone(memory_format=torch.contiguous_format)
    return numbers.view(torch.float16).float()


def unpack(packed: torch.Tensor, bits: int, codes: torch.Tensor) -> None:
    """Write the fields of bytes: of each group, first the low bits of all its bytes, then the next ones.

    Args:
        packed: uint8 `[n, groups, width]`; `width` is a multiple of 8.
        bits: of a field.
        codes: the result, uint8 `[n, elements]`.
    """
    count, groups, _ = packed.shape
    # Words of 8 bytes are faster than bytes. What comes from the next byte is masked.
    words = _PACKED.of(tuple(packed.shape), torch.uint8).copy_(packed).view(torch.int64)
    fields = codes.view(torch.int64).view(count, groups, 8 // bits, -1)
    for idx in range(8 // bits):
        torch.bitwise_right_shift(words, bits * idx, out=fields[:, :, idx])
    fields &= int.from_bytes([(1 << bits) - 1] * 8, "little")


class Slice:
    """Some blocks, and memory to decode them in.

    Attributes:
        blocks: uint8 `[n, bytes]`.
        codes: for the codes, uint8 `[n, elements]`.
        values: for the result, float32 `[n, elements]`.
    """

    def __init__(self, blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
        self.blocks, self.codes, self.values = blocks, codes[: len(blocks)], values[: len(blocks)]

    def more(self) -> torch.Tensor:
        """Return memory for other codes, uint8 `[n, elements]`. It is a part of `values`."""
        return self.values.view(torch.uint8).view(-1)[: self.codes.numel()].view(self.codes.shape)

    def add_high_bits(self, more: torch.Tensor, bits: int) -> None:
        """Put the codes `more` above the `bits` low bits of `codes`."""
        more.view(torch.int64).bitwise_left_shift_(bits)
        self.codes |= more

    def scale(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the values: codes times the scales `[n, groups]` of their groups."""
        self.values.copy_(codes)
        self._by_group(scales).mul_(scales.unsqueeze(-1))

    def subtract(self, minima: torch.Tensor) -> None:
        """Subtract the minima `[n, groups]` of groups from the values."""
        self._by_group(minima).sub_(minima.unsqueeze(-1))

    def _by_group(self, scales: torch.Tensor) -> torch.Tensor:
        return self.values.view(*scales.shape, -1)


Expand = Callable[[Slice], None]


class Levels:
    """A table that gives each code of 4 bits an integer."""

    def __init__(self, levels: Sequence[int]) -> None:
        pairs = torch.zeros(16, 256, 2, dtype=torch.int8, device="cpu")
        pairs[:, :16, 0] = torch.tensor(levels, device="cpu")
        pairs[:, :16, 1] = torch.tensor(levels, device="cpu").unsqueeze(1)
        self._pairs = pairs.view(torch.int16).flatten()

    def look_up(self, part: Slice) -> torch.Tensor:
        """Replace codes by their integers, int8. Two codes are looked up at a time."""
        codes = part.codes.view(-1)
        indices = part.values.view(-1).view(torch.int32)[: len(codes) // 2]
        indices.copy_(codes.view(torch.uint16))
        torch.index_select(self._pairs, 0, indices, out=codes.view(torch.int16))
        return part.codes.view(torch.int8)
