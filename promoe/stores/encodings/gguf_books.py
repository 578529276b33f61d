"""The GGUF types IQ1, IQ2 and IQ3: blocks of 256 values, which are named by numbers of points in a code book.

A point is 8 values (IQ3: 4). All points of a type are in Transformers. Signs come from elsewhere in the block: those of 8
values are a byte, or 7 bits that are completed to an even number of ones.
"""

from __future__ import annotations

from functools import cache

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.gguf_bits import BITS_OF_BYTES, Slice, half

# The code book of each type that needs one.
BOOKS = {name: name for name in ("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS")} | {"IQ1_M": "IQ1", "IQ1_S": "IQ1"}
# Of each byte, and of each number of 7 bits: a byte of ones for each value that is negative, in an int64.
_SIGNS = BITS_OF_BYTES.view(torch.uint8).mul(255).view(torch.int64)
_SIGNS_OF_7_BITS = _SIGNS[[number | number.bit_count() % 2 << 7 for number in range(128)]]
_EIGHT = torch.arange(8, dtype=torch.int32, device="cpu")
_THREES = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device="cpu")
_NIBBLES = torch.tensor([0, 4], dtype=torch.int32, device="cpu")
_PAIRS = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device="cpu")
_SEVENS = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device="cpu")


def expand_iq2_xxs(part: Slice) -> None:
    """Decode 8 groups of 32: four numbers of points, four numbers of signs, and a scale."""
    groups = part.blocks[:, 2:66].unflatten(1, (8, 8))
    last = _words(groups[:, :, 4:], torch.int32)
    scales = half(part.blocks, 0) * ((last >> 28 & 15).float() + 0.5) * 0.25
    _write(part, book("IQ2_XXS"), groups[:, :, :4].int(), scales, _SIGNS_OF_7_BITS, _fields(last, _SEVENS, 127))


def expand_iq2_xs(part: Slice) -> None:
    """Decode 16 groups of 16: a number of a point has 9 bits, above which there are 7 of signs."""
    words = _words(part.blocks[:, 2:66], torch.uint16)
    scales = half(part.blocks, 0) * (_fields(part.blocks[:, 66:74].int(), _NIBBLES, 15).float() + 0.5) * 0.25
    _write(part, book("IQ2_XS"), words & 511, scales, _SIGNS_OF_7_BITS, words >> 9)


def expand_iq2_s(part: Slice) -> None:
    """Decode 16 groups of 16: the two high bits of the numbers of points are elsewhere."""
    high = _fields(part.blocks[:, 66:74].int(), _PAIRS, 3)
    scales = half(part.blocks, 0) * (_fields(part.blocks[:, 74:82].int(), _NIBBLES, 15).float() + 0.5) * 0.25
    points = part.blocks[:, 2:34].int() | high << 8
    _write(part, book("IQ2_S"), points, scales, _SIGNS, part.blocks[:, 34:66].int())


def expand_iq3_xxs(part: Slice) -> None:
    """Decode 8 groups of 32: four numbers of signs and a scale are in a word."""
    words = _words(part.blocks[:, 66:98], torch.int32)
    scales = half(part.blocks, 0) * ((words >> 28 & 15).float() + 0.5) * 0.5
    points = part.blocks[:, 2:66].int()
    _write(part, book("IQ3_XXS"), points, scales, _SIGNS_OF_7_BITS, _fields(words, _SEVENS, 127))


def expand_iq3_s(part: Slice) -> None:
    """Decode 8 groups of 32: the high bit of the numbers of points is elsewhere."""
    high = _fields(part.blocks[:, 66:74].int(), _EIGHT, 1)
    scales = half(part.blocks, 0) * (_fields(part.blocks[:, 106:110].int(), _NIBBLES, 15) * 2 + 1)
    points = part.blocks[:, 2:66].int() | high << 8
    _write(part, book("IQ3_S"), points, scales, _SIGNS, part.blocks[:, 74:106].int())


def expand_iq1_s(part: Slice) -> None:
    """Decode 8 groups of 32: a word has three more bits of four numbers of points, a scale, and what is added."""
    words = _words(part.blocks[:, 34:50], torch.uint16)
    high = _fields(words, _THREES, 7).view(-1, 8, 4) | (words >> 15 << 3).unsqueeze(-1)
    points = part.blocks[:, 2:34].int() | high.flatten(1) << 8
    _write(part, _eighths(), points, half(part.blocks, 0) * ((words >> 12 & 7) * 2 + 1) * 0.125)


def expand_iq1_m(part: Slice) -> None:
    """Decode 16 groups of 16: 4 bits for each point complete its number, and say what is added."""
    words = _words(part.blocks[:, 48:56], torch.uint16)
    # The block's scale is in the high bits of four words.
    bits = (words >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32, device="cpu")
    halves = bits.sum(1, keepdim=True).to(torch.uint16).view(torch.float16).float()
    points = part.blocks[:, :32].int() | _fields(part.blocks[:, 32:48].int(), _NIBBLES, 15) << 8
    _write(part, _eighths(), points, halves * (_fields(words, _THREES, 7) * 2 + 1) * 0.125)


@cache
def book(name: str) -> torch.Tensor:
    """Return the points of a code book, each as an integer: one byte, int8, for each value.

    Args:
        name: a type; "IQ1": both types have the same.

    Raises:
        CheckpointError: this version of Transformers does not have it.
    """
    try:
        from transformers.integrations.gguf.dequant import GRID_SPECS

        levels, shape, digits = GRID_SPECS[name]
    except (ImportError, KeyError):
        import transformers

        raise CheckpointError(
            f"The checkpoint has tensors in {name} blocks, whose code book Transformers has, but not in this version "
            f"({transformers.__version__}). Upgrade Transformers (tested with 5.23), or open a file of another type, such as "
            "Q4_K_M."
        ) from None
    packed = torch.frombuffer(bytearray.fromhex(digits.decode()), dtype=torch.uint8)
    shifts = _NIBBLES if len(levels) > 4 else _PAIRS
    numbers = _fields(packed.int().unsqueeze(0), shifts, 7 if len(levels) > 4 else 3)
    points = torch.tensor(levels, dtype=torch.int8, device="cpu")[numbers].view(shape)
    return points.view({4: torch.int32, 8: torch.int64}[shape[1]]).flatten()


@cache
def _eighths() -> torch.Tensor:
    """Return the points of IQ1 in eighths: first with 1/8 added to each value, then with 1/8 subtracted."""
    points = book("IQ1").view(torch.int8) * 8
    return torch.cat((points + 1, points - 1)).view(torch.int64)


def _words(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the last dimension's bytes as numbers of a dtype, in int32."""
    words = packed.clone(memory_format=torch.contiguous_format).view(dtype).int()
    return words.flatten(1)


def _fields(words: torch.Tensor, shifts: torch.Tensor, mask: int) -> torch.Tensor:
    """Return the fields of words `[n, count]`, shifted by `shifts`, as `[n, count * fields]`."""
    return (words.unsqueeze(-1) >> shifts & mask).flatten(1)


def _write(
    part: Slice,
    book: torch.Tensor,
    points: torch.Tensor,
    scales: torch.Tensor,
    all_signs: torch.Tensor | None = None,
    signs: torch.Tensor | None = None,
) -> None:
    """Write the values of points times the scales of their groups.

    Args:
        part: the blocks.
        book: the points.
        points: numbers of points, in order.
        scales: `[n, groups]`.
        all_signs: masks of 8 signs; None: points have them.
        signs: numbers of masks, in order.
    """
    torch.index_select(book, 0, points.flatten(), out=part.codes.view(book.dtype).view(-1))
    if all_signs is not None and signs is not None:
        negative = part.more()
        torch.index_select(all_signs, 0, signs.flatten(), out=negative.view(torch.int64).view(-1))
        # With all bits inverted, and one more, a number is its negative.
        part.codes ^= negative
        part.codes -= negative
    part.scale(part.codes.view(torch.int8), scales)
