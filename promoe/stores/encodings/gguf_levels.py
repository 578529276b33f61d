"""The GGUF blocks whose codes of 4 bits are numbers of levels in a table: IQ4 types, and MXFP4."""

from __future__ import annotations

import torch

from promoe.stores.encodings.gguf_bits import Levels, Slice, half, unpack

_IQ4 = Levels((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
# Twice the values; GGUF has no -0.
_FP4 = Levels((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


def expand_iq4_nl(part: Slice) -> None:
    """Decode levels times a scale."""
    unpack(part.blocks[:, None, 2:18], 4, part.codes)
    part.scale(_IQ4.look_up(part), half(part.blocks, 0))


def expand_iq4_xs(part: Slice) -> None:
    """Decode levels of 8 groups of 32, times a scale of 6 bits, of which two are in bytes 2 and 3."""
    count = len(part.blocks)
    low, high = part.blocks[:, 4:8, None], part.blocks[:, 2:4, None]
    low = torch.cat((low & 15, low >> 4), -1).view(count, 8)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).view(count, 8)
    integer_scales = (low | high << 4).view(torch.int8) - 32
    unpack(part.blocks[:, 8:136].unflatten(1, (8, 16)), 4, part.codes)
    part.scale(_IQ4.look_up(part), half(part.blocks, 0) * integer_scales)


def expand_mxfp4(part: Slice) -> None:
    """Decode FP4 values times 2^(byte - 127); no byte means NaN."""
    unpack(part.blocks[:, None, 1:17], 4, part.codes)
    exponents = part.blocks[:, :1].int()
    # The bits of 2^(byte - 128), which is subnormal for 0 and 1.
    bits = torch.where(exponents < 2, (1 << 21) << exponents.clamp(max=1), (exponents - 1) << 23)
    part.scale(_FP4.look_up(part), bits.view(torch.float32))
