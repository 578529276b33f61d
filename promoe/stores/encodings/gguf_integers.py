"""GGUF blocks whose values are integers of 4 bits with scales and zeros: their codes, without decoding them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from promoe.stores.encodings.gguf_bits import half, unpack
from promoe.stores.encodings.gguf_k import scales_and_minima

# Values that share a scale in all of them.
GROUP = 32
# Called with blocks and uint8 `[n, elements]` for the codes. Returns scales `[n, elements / 32]` and zeros, or None, with
# which a value is (code - 8) * scale + zero.
Unpack = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def unpack_q4_0(blocks: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unpack codes less 8, times a scale."""
    unpack(blocks[:, None, 2:], 4, codes)
    return half(blocks, 0), None


def unpack_q4_1(blocks: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unpack codes times a scale, plus a minimum."""
    unpack(blocks[:, None, 4:], 4, codes)
    scales = half(blocks, 0)
    return scales, 8 * scales + half(blocks, 2)


def unpack_q4_k(blocks: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unpack 8 groups of codes times a scale, less a minimum."""
    unpack(blocks[:, 16:].unflatten(1, (4, 32)), 4, codes)
    scales, minima = scales_and_minima(blocks)
    return scales, 8 * scales - minima
