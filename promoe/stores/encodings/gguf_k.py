"""The K-quants of GGUF: blocks of 256 values, in groups that have small integer scales of their own."""

from __future__ import annotations

import torch

from promoe.stores.encodings.gguf_bits import half, scale, unpack


def expand_q2_k(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode 16 groups of 16: a byte has a scale in its low and a minimum in its high bits."""
    count = len(blocks)
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    unpack(packed.unflatten(1, (2, 32)), 2, codes)
    scale(codes, half(blocks, 80) * (scales & 15), values)
    values.view(count, 16, 16).sub_((half(blocks, 82) * (scales >> 4)).unsqueeze(-1))


def expand_q3_k(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode 16 groups of 16: each code has two bits and, elsewhere, a third one."""
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_scales = torch.cat((scales[:, :8] & 15, scales[:, :8] >> 4), 1)
    high_scales = torch.cat([scales[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    unpack(packed.unflatten(1, (2, 32)), 2, codes)
    by_bit = codes.view(len(blocks), 8, 32)
    for bit in range(8):
        # Where the bit is not set, 4 is subtracted.
        by_bit[:, bit] += (high >> bit & 1) << 2
    codes -= 4
    integer_scales = (low_scales | high_scales << 4).view(torch.int8) - 32
    scale(codes.view(torch.int8), half(blocks, 108) * integer_scales, values)


def expand_q4_k(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode 8 groups of 32."""
    unpack(blocks[:, 16:].unflatten(1, (4, 32)), 4, codes)
    _scale_and_shift(blocks, codes, values)


def expand_q5_k(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode 8 groups of 32: each code has four bits and, elsewhere, a fifth one."""
    high = blocks[:, 16:48]
    unpack(blocks[:, 48:].unflatten(1, (4, 32)), 4, codes)
    by_bit = codes.view(len(blocks), 8, 32)
    for bit in range(8):
        by_bit[:, bit] |= (high >> bit & 1) << 4
    _scale_and_shift(blocks, codes, values)


def expand_q6_k(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Decode 16 groups of 16: each code has four bits and, elsewhere, two more."""
    high = blocks[:, 128:192].unflatten(1, (2, 32))
    unpack(blocks[:, :128].unflatten(1, (2, 64)), 4, codes)
    by_field = codes.view(len(blocks), 2, 4, 32)
    for idx in range(4):
        by_field[:, :, idx] |= (high >> 2 * idx & 3) << 4
    codes -= 32
    integer_scales = blocks[:, 192:208].view(torch.int8)
    scale(codes.view(torch.int8), half(blocks, 208) * integer_scales, values)


def scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K and Q5_K, `[n, 8]`. They have 6 bits each in 12 bytes."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, last >> 4 | second >> 6 << 4), 1)
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def _scale_and_shift(blocks: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of Q4_K and Q5_K: codes times a scale less a minimum."""
    scales, minima = scales_and_minima(blocks)
    scale(codes, scales, values)
    values.view(len(blocks), 8, 32).sub_(minima.unsqueeze(-1))
