"""AWQ as AutoAWQ's "gemm" version stores it (`quant_method` "awq"): codes of 4 bits, with a scale and a zero per group.

`X.qweight [in, out / 8]` and `X.qzeros [in / group, out / 8]` are int32 words of 8 outputs, and `X.scales [in / group, out]`
are floats. A word has outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on. The weight is `(code - zero) * scale`,
transposed to `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, Integers, StoredTensor
from promoe.stores.encodings.overrides import Overrides
from promoe.stores.encodings.packed_integers import (
    SCALE_DTYPES,
    PackedIntegers,
    named,
    parts_of_modules,
    replaced,
    wrong_parts,
)
from promoe.stores.safetensors_header import TensorRange

PARTS = ("qweight", "qzeros", "scales")
_OUTPUTS_OF_WORD = 8


@dataclass(frozen=True)
class Awq(PackedIntegers):
    """Words of 8 outputs, of 4 bits each.

    Attributes:
        group: inputs that share a scale and a zero.
        is_symmetric: see `PackedIntegers`.
        name, integers: see `Encoding`.
    """

    group: int
    is_symmetric: bool
    name: str
    integers: Integers
    bits = 4

    def num_outputs(self, parts: Sequence[torch.Tensor]) -> int:
        """See `PackedIntegers.num_outputs`."""
        return parts[2].shape[1]

    def codes(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.codes`."""
        return _codes(parts[0], outputs)

    def scales(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.scales`."""
        return parts[2][:, outputs].t().float()

    def zeros(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.zeros`."""
        return _codes(parts[1], outputs).float()


def _codes(words: torch.Tensor, outputs: slice) -> torch.Tensor:
    """Return some outputs of words `[rows, out / 8]`, as uint8 `[outputs, rows]`."""
    packed = words.view(torch.uint8)[:, outputs.start // 2 : outputs.stop // 2].t().contiguous()
    # Of output 4 a + 2 b + c of a word, byte 2 c + a has the code: in its low bits if b is 0, in its high bits if it is 1.
    packed = packed.view(-1, 2, 2, len(words)).transpose(1, 2)
    codes = torch.empty((len(packed), 2, 2, 2, len(words)), dtype=torch.uint8, device=words.device)
    torch.bitwise_and(packed, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=codes[:, :, 1])
    return codes.view(-1, len(words))


def find_awq(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the words, zeros and scales of each weight as one.

    Raises:
        CheckpointError: the version is not "gemm", or a weight's tensors do not belong together.
    """
    version = quantization.get("version") or quantization.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise CheckpointError(
            f'The checkpoint is in the version {str(version)[:40]!r} of AWQ. Only "gemm" can be read, which most have: open '
            'another checkpoint of the model, or the original one in 16 bits, with experts="int4" (`promoe quantize`).'
        )
    overrides = Overrides(quantization)
    weights = [
        _weight(module, parts, _is_symmetric(overrides.of(module)))
        for module, parts in parts_of_modules(tensors, PARTS).items()
        if "qweight" in parts or "qzeros" in parts
    ]
    return replaced(tensors, weights)


def _is_symmetric(quantization: Mapping[str, Any]) -> bool:
    """Return whether all zeros are the code in the middle.

    AutoAWQ says `zero_point`, AutoRound `sym`. GPTQModel says both: it quantises by `zero_point`, and `sym` is true whatever
    that is.
    """
    zero_point = quantization.get("zero_point")
    return quantization.get("sym") is True if zero_point is None else zero_point is False


def _weight(module: str, parts: Mapping[str, TensorRange], is_symmetric: bool) -> EncodedTensor:
    wrong = partial(
        wrong_parts,
        module,
        parts,
        "expected are qweight [in, out / 8] I32, qzeros [in / group, out / 8] I32, and scales [in / group, out] F16, BF16 or "
        "F32",
    )
    if set(parts) != set(PARTS) or any(len(part.shape) != 2 or 0 in part.shape for part in parts.values()):
        raise wrong()
    words, zeros, scales = (parts[name] for name in PARTS)
    inputs, groups, outputs = words.shape[0], *scales.shape
    if (
        (words.dtype_name, zeros.dtype_name) != ("I32", "I32")
        or scales.dtype_name not in SCALE_DTYPES
        or (words.shape[1] * _OUTPUTS_OF_WORD, zeros.shape) != (outputs, (groups, words.shape[1]))
        or inputs % groups
    ):
        raise wrong()
    group = inputs // groups
    encoding = Awq(group, is_symmetric, named("AWQ", Awq.bits, group), Integers(Awq.bits, group))
    return EncodedTensor(f"{module}.weight", (outputs, inputs), (words, zeros, scales), encoding)
