"""MXFP4, as gpt-oss is published (`quant_method` "mxfp4"): values of 4 bits, with an exponent for each 32 of them.

`X_blocks [E, out, in / 32, 16]` has two values in each byte, the first in its low bits. `X_scales [E, out, in / 32]` has
exponents plus 127. The model has the weight transposed, `[E, in, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings import slices
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.encodings.companions import WHAT_TO_DO, beside, described, where
from promoe.stores.encodings.slices import codes_of, values_of
from promoe.stores.encodings.small_floats import E2M1
from promoe.stores.safetensors_header import TensorRange

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = 32  # of a block
OUTPUTS = 512  # transposed at a time: rows of the result are written in pieces that are long enough


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """Blocks of 32 values of 4 bits that share an exponent; the weight is their transpose."""

    name = "mxfp4"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        blocks, exponents = parts
        outputs, groups, _ = blocks.shape
        step = max(1, slices.SLICE_ELEMENTS // (OUTPUTS * VALUES))
        for start in range(0, outputs, OUTPUTS):
            for first in range(0, groups, step):
                part = (slice(start, start + OUTPUTS), slice(first, first + step))
                values = _transposed(blocks[part], exponents[part])
                out[VALUES * first : VALUES * (first + step), start : start + OUTPUTS] = values


def _transposed(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks `[out, groups, 16]`, float32 `[groups * 32, out]`."""
    outputs, groups, width = blocks.shape
    values = values_of((groups * VALUES, outputs))
    packed, transposed, *_ = values.view(torch.uint8).view(-1).view(8, -1)
    codes = values.view(torch.uint8).view(4, groups * width, 2, outputs)[1]
    packed = packed.view(outputs, groups * width).copy_(blocks.flatten(1))
    transposed = transposed.view(groups * width, outputs).copy_(packed.t())
    torch.bitwise_left_shift(transposed, 4, out=codes[:, 0])
    torch.bitwise_and(transposed, 0xF0, out=codes[:, 1])
    memory = codes_of(tuple(codes.shape), torch.int16)
    values.copy_(E2M1.halves(codes, memory).view(values.shape))
    values *= E2M1.factor
    # The bits of 2^(exponent - 127), which is subnormal for 0, and infinite for 255.
    scales = (exponents.t().contiguous().int() << 23).clamp_(min=1 << 22).view(torch.float32)
    values.view(groups, VALUES, outputs).mul_(scales.unsqueeze(1))
    return values


def find_mxfp4(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the blocks and exponents of each weight as one.

    Raises:
        CheckpointError: a weight's blocks and exponents do not belong together.
    """
    found: dict[str, StoredTensor] = dict(tensors)
    for blocks in tensors.values():
        name = blocks.name.removesuffix(BLOCKS)
        scales = tensors.get(name + SCALES)
        if not blocks.name.endswith(BLOCKS) or (scales is None and blocks.dtype_name != "U8"):
            continue
        if (
            scales is None
            or len(blocks.shape) != 4
            or blocks.shape[-1] != 16
            or scales.shape != blocks.shape[:-1]
            or (blocks.dtype_name, scales.dtype_name) != ("U8", "U8")
        ):
            exponents = "no exponents" if scales is None else f"the exponents {described([scales])}"
            raise CheckpointError(
                f"The checkpoint's {described([blocks])}{where(blocks)} has {exponents}: expected are {name}{BLOCKS} "
                f"[experts, out, in / 32, 16] U8 and {name}{SCALES} [experts, out, in / 32] U8. Found beside it: "
                f"{described(beside(tensors, name))}. {WHAT_TO_DO}"
            )
        count, outputs, groups, _ = blocks.shape
        found[name] = EncodedTensor(name, (count, 32 * groups, outputs), (blocks, scales), Mxfp4())
        del found[blocks.name], found[scales.name]
    return found
