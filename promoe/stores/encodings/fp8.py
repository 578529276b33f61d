"""FP8 with a scale for each block of a weight, as DeepSeek-V3 and others are published: `quant_method` "fp8".

`X.weight` (E4M3, or two E2M1 values in a byte) times `X.weight_scale_inv`, one number for each block of rows and columns.
Scales are floats, or exponents (E8M0, or bytes that mean 2^(byte - 127)). The last blocks may be cut off where the weight
ends: DeepSeek-V3 has 576 rows in blocks of 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings import slices
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.encodings.companions import WHAT_TO_DO, described, where
from promoe.stores.encodings.slices import codes_of, values_of
from promoe.stores.encodings.small_floats import E2M1, E4M3, E5M2
from promoe.stores.safetensors_header import TensorRange

# How the scales of X or X.weight are named: the first one by most checkpoints, the others by DeepSeek-V4 and Mistral.
SCALE = "_scale_inv"
_OTHER_NAMES = (".scale", ".qscale_weight")
_WEIGHT_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_KINDS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1, torch.int8: E2M1}
_LARGEST_SCALE = 2.0**112


@dataclass(frozen=True)
class Fp8(Encoding):
    """Scaled blocks of FP8 values (or of two FP4 values in a byte).

    Attributes:
        block: rows and columns of a block, if the last blocks are cut off; None: all are alike.
    """

    block: tuple[int, int] | None = None
    name = "fp8"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        codes, scales = parts
        if self.block is None:
            self._decode_alike(codes, scales, out)
            return
        (size, columns_size), most = self.block, max(1, slices.SLICE_ELEMENTS // (self.block[0] * out.shape[1]))
        for rows, of_rows in _alike(out.shape[0], size, most):
            for columns, of_columns in _alike(out.shape[1], columns_size, out.shape[1]):
                decoded = torch.empty(out[rows, columns].shape, dtype=out.dtype, device="cpu")
                self._decode_alike(codes[rows, columns].contiguous(), scales[of_rows, of_columns].contiguous(), decoded)
                out[rows, columns] = decoded

    def _decode_alike(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        scales = scales.view(-1, scales.shape[-1]) if scales.dim() >= 2 else scales.view(1, 1)
        # [rows of blocks, rows of a block, columns]
        codes, out = codes.view(len(scales), -1, codes.shape[-1]), out.view(len(scales), -1, out.shape[-1])
        # A slice is several whole rows of blocks, or a part of one.
        rows = max(1, slices.SLICE_ELEMENTS // out.shape[2])
        num_blocks, rows = max(1, rows // out.shape[1]), min(rows, out.shape[1])
        for block in range(0, len(scales), num_blocks):
            of_blocks = _floats(scales[block : block + num_blocks])
            for row in range(0, out.shape[1], rows):
                part = (slice(block, block + num_blocks), slice(row, row + rows))
                _decode_slice(codes[part], of_blocks, out[part])


def _alike(size: int, block: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows (or columns) in blocks that are alike, at most `most` at a time, and their scales: the cut one is last."""
    whole = size // block
    for first in range(0, whole, most):
        last = min(first + most, whole)
        yield slice(first * block, last * block), slice(first, last)
    if size % block:
        yield slice(whole * block, size), slice(whole, whole + 1)


def _floats(scales: torch.Tensor) -> torch.Tensor:
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _decode_slice(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Decode values `[rows of blocks, rows, columns]`, with scales float32 `[rows of blocks, blocks of columns]`."""
    values = values_of(tuple(out.shape))
    kind = _KINDS.get(codes.dtype)
    # With the factor, larger scales would become infinite. NaN is not smaller, either.
    if kind is None or not float(scales.abs().max()) < _LARGEST_SCALE or (kind is E4M3 and _has_nan(codes)):
        values.copy_(_plain(codes))
    else:
        memory = codes_of(tuple(out.shape), torch.int16)
        values.copy_(kind.halves(_separated(codes, values) if kind is E2M1 else codes, memory))
        scales = scales * kind.factor
    values.unflatten(2, (scales.shape[1], -1)).mul_(scales[:, None, :, None])
    out.copy_(values)


def _has_nan(codes: torch.Tensor) -> bool:
    return int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF


def _separated(codes: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a byte for each FP4 value, in its high bits; in the first half of `memory`."""
    space = memory.view(torch.int16).view(4, *codes.shape)
    pairs, low = space[0], space[1]
    pairs.copy_(codes.view(torch.uint8))
    torch.bitwise_left_shift(pairs, 4, out=low)
    low &= 0x00F0
    pairs <<= 8
    pairs &= 0xF000 - 2**16
    pairs |= low
    return pairs.view(torch.int8)


def _plain(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes of any dtype."""
    if codes.dtype not in (torch.int8, torch.uint8):
        return codes.float()
    codes, table = codes.view(torch.uint8), torch.tensor(_FP4, dtype=torch.float32, device="cpu")
    return torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).flatten(-2)


def find_fp8(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with each weight and its scales as one.

    Raises:
        CheckpointError: a weight has other scales than its shape and the size of blocks say.
    """
    found: dict[str, StoredTensor] = dict(tensors)
    blocks = _blocks(quantization.get("weight_block_size"))
    for name, scales in tensors.items():
        weight = tensors.get(_weight_of(name))
        if weight is None or (not name.endswith(SCALE) and weight.dtype_name not in _WEIGHT_DTYPES):
            continue
        other = found[weight.name]
        if isinstance(other, EncodedTensor):
            raise CheckpointError(
                f"The checkpoint's {weight.name!r} has scales twice: {described((*other.parts[1:], scales))}. Remove the files "
                "of one of them from the folder."
            )
        found[weight.name] = _weight(weight, scales, blocks)
        del found[name]
    return found


def _weight_of(scales: str) -> str:
    """Return the name of the weight that scales with this name belong to; empty: it is no name of scales."""
    if scales.endswith(SCALE):
        return scales.removesuffix(SCALE)
    return next((scales.removesuffix(name) + ".weight" for name in _OTHER_NAMES if scales.endswith(name)), "")


def _blocks(size: Any) -> list[tuple[int, int]]:
    """Return the size of blocks that config.json states, as the only one; empty: it states none."""
    is_size = isinstance(size, list | tuple) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)
    return [(size[0], size[1])] if is_size else []


def fp8_of(shape: tuple[int, ...], scales: tuple[int, ...], blocks: Sequence[tuple[int, int]]) -> Fp8 | None:
    """Return the encoding of a weight by the shapes of both; None: they do not belong together.

    Args:
        shape: of the weight, or of a stack of weights.
        scales: their shape: `[rows of blocks, columns of blocks]` for each weight, or one number for each.
        blocks: the sizes that a block may have. If there is none, blocks must be alike, and square, in one row, or the
            whole weight: scales that belong to another weight, or are transposed, seldom are.
    """
    stack = shape[:-2]
    counts = scales[len(stack) :]
    if not 2 <= len(shape) <= 3 or 0 in (*shape, *scales) or scales[: len(stack)] != stack:
        return None
    counts = (1, 1) if counts in ((), (1,)) else counts
    if len(counts) != 2:
        return None
    for block in blocks:
        sizes = list(zip(shape[-2:], block, counts, strict=True))
        if all(-(-size // part) == count for size, part, count in sizes):
            is_cut = any(size % part and size > part for size, part, _ in sizes)
            return Fp8(block) if is_cut else Fp8()
    if blocks or shape[-2] % counts[0] or shape[-1] % counts[1]:
        return None
    rows, columns = shape[-2] // counts[0], shape[-1] // counts[1]
    return Fp8() if rows == columns or rows == 1 or counts == (1, 1) else None


def _weight(weight: TensorRange, scales: TensorRange, blocks: Sequence[tuple[int, int]]) -> EncodedTensor:
    shape, is_fp4 = weight.shape, weight.dtype_name in ("I8", "U8")
    if is_fp4 and shape:
        shape, blocks = (*shape[:-1], 2 * shape[-1]), ()
    encoding = fp8_of(shape, scales.shape, blocks)
    if weight.dtype_name not in _WEIGHT_DTYPES or scales.dtype_name not in _SCALE_DTYPES or encoding is None:
        size = f"blocks of {' x '.join(map(str, blocks[0]))}" if blocks else "blocks"
        raise CheckpointError(
            f"The checkpoint's {weight.name!r} ({weight.dtype_name}{where(weight)}) has shape {list(shape)}, which is "
            f"not divisible into the {size} of its {list(scales.shape)} scales ({scales.dtype_name}, {scales.name!r}), or one "
            f"of their dtypes is not expected: {', '.join(_WEIGHT_DTYPES)} with scales in {', '.join(_SCALE_DTYPES)} are. "
            f"{WHAT_TO_DO}"
        )
    return EncodedTensor(weight.name, shape, (weight, scales), encoding)
