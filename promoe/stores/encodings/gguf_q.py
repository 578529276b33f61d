"""The plain GGUF blocks of 32 values, and the ternary ones of 256."""

from __future__ import annotations

import torch

from promoe.stores.encodings.gguf_bits import half, scale, unpack


def expand_q4_0(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 4 bits less 8, times a scale."""
    unpack(blocks[:, None, 2:], 4, codes)
    codes -= 8
    scale(codes.view(torch.int8), half(blocks, 0), values)


def expand_q4_1(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 4 bits, times a scale, plus a minimum."""
    unpack(blocks[:, None, 4:], 4, codes)
    scale(codes, half(blocks, 0), values)
    values += half(blocks, 2)


def expand_q5_0(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 5 bits less 16, times a scale."""
    _five_bits(blocks[:, 2:6], blocks[:, 6:], codes)
    codes -= 16
    scale(codes.view(torch.int8), half(blocks, 0), values)


def expand_q5_1(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 5 bits, times a scale, plus a minimum."""
    _five_bits(blocks[:, 4:8], blocks[:, 8:], codes)
    scale(codes, half(blocks, 0), values)
    values += half(blocks, 2)


def expand_q8_0(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 8 bits, times a scale."""
    scale(blocks[:, 2:].view(torch.int8), half(blocks, 0), values)


def expand_tq1_0(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode -1, 0 or 1, five in a byte as a number of base 3 (in the last four bytes, four), times a scale."""
    start = 0
    for packed, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)):
        for idx in range(digits):
            stop = start + packed.shape[1]
            torch.mul(packed, 3**idx, out=codes[:, start:stop])
            start = stop
    # The first digit of c / 256 in base 3 is 3 c / 256, rounded down.
    digits_ = (codes >= 86).view(torch.int8) + (codes >= 171).view(torch.int8)
    scale(digits_ - 1, half(blocks, 52), values)


def expand_tq2_0(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode codes of 2 bits less 1, times a scale."""
    unpack(blocks[:, :64].unflatten(1, (2, 32)), 2, codes)
    codes -= 1
    scale(codes.view(torch.int8), half(blocks, 64), values)


def _five_bits(high: torch.Tensor, low: torch.Tensor, codes: torch.Tensor) -> None:
    """Write codes whose fifth bits are 32 bits in a row."""
    unpack(low.unsqueeze(1), 4, codes)
    bits = torch.arange(8, dtype=torch.uint8, device="cpu")
    codes |= ((high.unsqueeze(-1) >> bits & 1) << 4).flatten(1)
