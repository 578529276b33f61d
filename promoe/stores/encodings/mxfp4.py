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
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.encodings.fp8 import _FP4
from promoe.stores.safetensors_header import TensorRange

BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """Blocks of 32 values of 4 bits that share an exponent; the weight is their transpose."""

    name = "mxfp4"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        blocks, exponents = parts
        table = torch.tensor(_FP4, device="cpu")
        values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
        values = torch.ldexp(values, exponents.int().sub_(127).unsqueeze(-1))
        out.copy_(values.flatten(-2).t())


def find_mxfp4(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the blocks and exponents of each weight as one.

    Raises:
        CheckpointError: a weight's blocks and exponents do not belong together.
    """
    found: dict[str, StoredTensor] = dict(tensors)
    for blocks in tensors.values():
        name = blocks.name.removesuffix(BLOCKS)
        scales = tensors.get(name + SCALES)
        if not blocks.name.endswith(BLOCKS) or scales is None:
            continue
        if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
            raise CheckpointError(
                f"The checkpoint's {blocks.name!r} has shape {list(blocks.shape)} and its exponents {list(scales.shape)}: "
                "[experts, out, in / 32, 16] and [experts, out, in / 32] were expected. The checkpoint is damaged, or in "
                "another format."
            )
        count, outputs, groups, _ = blocks.shape
        found[name] = EncodedTensor(name, (count, 32 * groups, outputs), (blocks, scales), Mxfp4())
        del found[blocks.name], found[scales.name]
    return found
