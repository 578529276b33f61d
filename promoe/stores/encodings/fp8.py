"""FP8 with a scale for each block of a weight, as DeepSeek-V3 and others are published: `quant_method` "fp8".

`X.weight` (E4M3, or two E2M1 values in a byte) times `X.weight_scale_inv`, one number for each block of rows and columns.
Scales are floats, or exponents (E8M0, or bytes that mean 2^(byte - 127)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.safetensors_header import TensorRange

SCALE = "_scale_inv"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Fp8(Encoding):
    """Scaled blocks of FP8 values (or of two FP4 values in a byte)."""

    name = "fp8"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        values, scales = parts
        if values.dtype in (torch.int8, torch.uint8):
            codes = values.view(torch.uint8)
            table = torch.tensor(_FP4, device="cpu")
            values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        rows, columns = scales.shape[-2:] if scales.dim() >= 2 else (1, 1)
        blocks = values.float().unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
        out.copy_((blocks * scales.view(rows, 1, columns, 1)).view(out.shape))


def find_fp8(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with each weight and its scales as one.

    Raises:
        CheckpointError: a weight is not divisible into as many blocks as it has scales.
    """
    found: dict[str, StoredTensor] = dict(tensors)
    for name in tensors:
        weight = tensors.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and weight is not None:
            found[weight.name] = EncodedTensor(
                weight.name, _shape(weight, tensors[name]), (weight, tensors[name]), Fp8()
            )
            del found[name]
    return found


def _shape(weight: TensorRange, scales: TensorRange) -> tuple[int, ...]:
    """Return the shape of the decoded weight."""
    shape = weight.shape
    if len(shape) >= 2 and weight.dtype in (torch.int8, torch.uint8):
        shape = (*shape[:-1], 2 * shape[-1])
    blocks = scales.shape[-2:] if len(scales.shape) >= 2 else (1, 1)
    if (
        len(shape) < 2
        or 0 in blocks
        or any(size % count for size, count in zip(shape[-2:], blocks, strict=True))
        or scales.dtype is None
    ):
        raise CheckpointError(
            f"The checkpoint's {weight.name!r} has shape {list(shape)}, which is not divisible into the blocks of its "
            f"{list(scales.shape)} scales ({scales.dtype_name}). The checkpoint is damaged, or in another format."
        )
    return shape
