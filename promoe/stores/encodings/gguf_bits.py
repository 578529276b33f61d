"""What decoders of GGUF blocks share: fields of bits, scales, and tables of levels.

Blocks are uint8 `[n, bytes]`. A decoder gets scratch memory for codes, uint8 `[n, elements]`, and writes float32 values
`[n, elements]`. A product of a code and its scale is exact in float32: it has at most 22 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Called with blocks, codes and values.
Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the fp16 number that lies at a byte of each block, as float32 `[n, 1]`."""
    # A copy is aligned, wherever the blocks are.
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def unpack(packed: torch.Tensor, bits: int, fields: torch.Tensor) -> None:
    """Write the fields of each byte: first the low bits of all bytes of a group, then the next ones.

    Args:
        packed: `[n, groups, width]`.
        bits: of a field.
        fields: the result, `[n, groups * fields per byte * width]`.
    """
    count, groups, width = packed.shape
    by_field = fields.view(count, groups, 8 // bits, width)
    for idx in range(8 // bits):
        torch.bitwise_right_shift(packed, bits * idx, out=by_field[:, :, idx])
    fields &= (1 << bits) - 1


def scale(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Write codes times the scale of their group: `[n, elements]`, where `scales` is `[n, groups]`."""
    values.copy_(codes)
    values.unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1))


class Levels:
    """A table that gives each code of 4 bits an integer."""

    def __init__(self, levels: Sequence[int]) -> None:
        self._table = torch.tensor(levels, dtype=torch.int8, device="cpu")

    def look_up(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the integers of codes."""
        return self._table[codes.int()]
