"""The K-quants of GGUF: blocks of 256 values, in groups that have small integer scales of their own."""

from __future__ import annotations

import torch

from promoe.stores.encodings.gguf_bits import Slice, half, unpack

_NIBBLES = torch.tensor([0, 4], dtype=torch.int32, device="cpu")


def expand_q2_k(part: Slice) -> None:
    """Decode 16 groups of 16: a byte has a scale in its low and a minimum in its high bits."""
    scales = part.blocks[:, :16]
    unpack(part.blocks[:, 16:80].unflatten(1, (2, 32)), 2, part.codes)
    part.scale(part.codes, half(part.blocks, 80) * (scales & 15))
    part.subtract(half(part.blocks, 82) * (scales >> 4))


def expand_q3_k(part: Slice) -> None:
    """Decode 16 groups of 16: each code has two bits and, elsewhere, a third one, less 4."""
    low, high = part.blocks[:, 96:104], part.blocks[:, 104:108]
    low_scales = torch.cat((low & 15, low >> 4), 1)
    high_scales = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    unpack(part.blocks[:, 32:96].unflatten(1, (2, 32)), 2, part.codes)
    unpack(part.blocks[:, None, :32], 1, more := part.more())
    part.add_high_bits(more, 2)
    part.codes -= 4
    integer_scales = (low_scales | high_scales << 4).view(torch.int8) - 32
    part.scale(part.codes.view(torch.int8), half(part.blocks, 108) * integer_scales)


def expand_q4_k(part: Slice) -> None:
    """Decode 8 groups of 32."""
    unpack(part.blocks[:, 16:144].unflatten(1, (4, 32)), 4, part.codes)
    _scale_and_shift(part)


def expand_q5_k(part: Slice) -> None:
    """Decode 8 groups of 32: each code has four bits and, elsewhere, a fifth one."""
    unpack(part.blocks[:, 48:176].unflatten(1, (4, 32)), 4, part.codes)
    unpack(part.blocks[:, None, 16:48], 1, more := part.more())
    part.add_high_bits(more, 4)
    _scale_and_shift(part)


def expand_q6_k(part: Slice) -> None:
    """Decode 16 groups of 16: each code has four bits and, elsewhere, two more, less 32."""
    unpack(part.blocks[:, :128].unflatten(1, (2, 64)), 4, part.codes)
    unpack(part.blocks[:, 128:192].unflatten(1, (2, 32)), 2, more := part.more())
    part.add_high_bits(more, 4)
    part.codes -= 32
    part.scale(part.codes.view(torch.int8), half(part.blocks, 208) * part.blocks[:, 192:208].view(torch.int8))


def scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K and Q5_K, `[n, 8]`. They have 6 bits each in 12 bytes."""
    words = blocks[:, 4:16].clone(memory_format=torch.contiguous_format).view(torch.int32)
    first, last = words[:, :2], words[:, 2:]
    high = (last >> _NIBBLES & 0x0F0F0F0F) | (first >> 2 & 0x30303030)
    # [n, scales or minima, 8]
    integers = torch.stack((first & 0x3F3F3F3F, high), 2).view(torch.uint8)
    products = half(blocks, 0, 2).unsqueeze(2) * integers
    return products[:, 0], products[:, 1]


def _scale_and_shift(part: Slice) -> None:
    """Write the values of Q4_K and Q5_K: codes times a scale less a minimum."""
    scales, minima = scales_and_minima(part.blocks)
    part.scale(part.codes, scales)
    part.subtract(minima)
