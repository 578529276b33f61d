"""The plain GGUF blocks of 32 values, and the ternary ones of 256."""

from __future__ import annotations

import torch

from promoe.stores.encodings.gguf_bits import BITS_OF_BYTES, Slice, half, unpack


def expand_q4_0(part: Slice) -> None:
    """Decode codes of 4 bits less 8, times a scale."""
    unpack(part.blocks[:, None, 2:18], 4, part.codes)
    part.codes -= 8
    part.scale(part.codes.view(torch.int8), half(part.blocks, 0))


def expand_q4_1(part: Slice) -> None:
    """Decode codes of 4 bits, times a scale, plus a minimum."""
    unpack(part.blocks[:, None, 4:20], 4, part.codes)
    part.scale(part.codes, half(part.blocks, 0))
    part.values += half(part.blocks, 2)


def expand_q5_0(part: Slice) -> None:
    """Decode codes of 5 bits less 16, times a scale."""
    unpack(part.blocks[:, None, 6:22], 4, part.codes)
    _add_fifth_bits(part, part.blocks[:, 2:6])
    part.codes -= 16
    part.scale(part.codes.view(torch.int8), half(part.blocks, 0))


def expand_q5_1(part: Slice) -> None:
    """Decode codes of 5 bits, times a scale, plus a minimum."""
    unpack(part.blocks[:, None, 8:24], 4, part.codes)
    _add_fifth_bits(part, part.blocks[:, 4:8])
    part.scale(part.codes, half(part.blocks, 0))
    part.values += half(part.blocks, 2)


def expand_q8_0(part: Slice) -> None:
    """Decode codes of 8 bits, times a scale."""
    part.scale(part.blocks[:, 2:].view(torch.int8), half(part.blocks, 0))


def expand_tq1_0(part: Slice) -> None:
    """Decode -1, 0 or 1, five in a byte as a number of base 3 (in the last four bytes, four), times a scale."""
    offset = 0
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for idx in range(digits):
            end = offset + stop - start
            torch.mul(part.blocks[:, start:stop], 3**idx, out=part.codes[:, offset:end])
            offset = end
    # The first digit of c / 256 in base 3 is 3 c / 256, rounded down.
    digits_less_1 = (part.codes >= 86).view(torch.int8) + (part.codes >= 171).view(torch.int8) - 1
    part.scale(digits_less_1, half(part.blocks, 52))


def expand_tq2_0(part: Slice) -> None:
    """Decode codes of 2 bits less 1, times a scale."""
    unpack(part.blocks[:, :64].unflatten(1, (2, 32)), 2, part.codes)
    part.codes -= 1
    part.scale(part.codes.view(torch.int8), half(part.blocks, 64))


def _add_fifth_bits(part: Slice, high: torch.Tensor) -> None:
    """Add the fifth bits of codes, which are in order in 4 bytes."""
    more = part.more()
    torch.index_select(BITS_OF_BYTES, 0, high.int().view(-1), out=more.view(torch.int64).view(-1))
    part.add_high_bits(more, 4)
