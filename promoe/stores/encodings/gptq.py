"""GPTQ (`quant_method` "gptq"): codes of 2, 4 or 8 bits, with a scale and a zero for each output and group of inputs.

`X.qweight [in * bits / 32, out]` are int32 words of inputs, `X.qzeros [groups, out * bits / 32]` words of outputs, both from
their lowest bits on. `X.scales [groups, out]` are floats, and `X.g_idx [in]` says each input's group. The weight is
`(code - zero) * scale`, transposed to `[out, in]`. With `checkpoint_format` "gptq", one is missing from all zeros: as
gptqmodel does, it is added to whole words, so that a zero that was 0 carries to the next.
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
    BITS,
    SCALE_DTYPES,
    PackedIntegers,
    as_integers,
    codes_in,
    named,
    other_order,
    parts_of_modules,
    replaced,
    wrong_parts,
)
from promoe.stores.safetensors_header import TensorRange

PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Which formats there are, and whether one is missing from their zeros.
FORMATS = {"gptq": True, "gptq_v2": False}
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq(PackedIntegers):
    """Words of inputs.

    Attributes:
        bits: of a code.
        group: inputs that share a scale and a zero, if they are one after the other; None: all.
        plus_one: whether one is missing from the zeros.
        is_symmetric: see `PackedIntegers`.
        name, integers: see `Encoding`.
    """

    bits: int
    group: int | None
    plus_one: bool
    is_symmetric: bool
    name: str
    integers: Integers | None

    def num_outputs(self, parts: Sequence[torch.Tensor]) -> int:
        """See `PackedIntegers.num_outputs`."""
        return parts[2].shape[1]

    def codes(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.codes`."""
        return codes_in(parts[0][:, outputs].t().contiguous(), self.bits)

    def scales(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.scales`."""
        return parts[2][:, outputs].t().float()

    def zeros(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.zeros`."""
        words = parts[1][:, outputs.start * self.bits // 32 : outputs.stop * self.bits // 32]
        return codes_in((words + _ONES[self.bits] * self.plus_one).contiguous(), self.bits).t().float()

    def group_of_input(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `PackedIntegers.group_of_input`."""
        if len(parts) == len(PARTS):
            return other_order(parts[3], num_groups=len(parts[2]))
        inputs = len(parts[0]) * 32 // self.bits
        size = self.group or inputs
        return None if inputs % size == 0 else torch.arange(inputs, device=parts[0].device) // size


def find_gptq(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the words, zeros, scales and groups of each weight as one.

    Raises:
        CheckpointError: the format is another one, or a weight's tensors do not belong together.
    """
    found = str(quantization.get("checkpoint_format") or quantization.get("format") or "gptq").lower()
    if quantization.get("is_marlin_format"):
        found = "marlin"
    if found not in FORMATS:
        raise CheckpointError(
            f"The checkpoint is in the format {found[:40]!r} of GPTQ. Only {' and '.join(FORMATS)} can be read, which most "
            'have: open another checkpoint of the model, or the original one in 16 bits, with experts="int4" '
            "(`promoe quantize`)."
        )
    overrides = Overrides(quantization)
    weights = [
        _weight(module, parts, overrides.of(module), FORMATS[found])
        for module, parts in parts_of_modules(tensors, PARTS).items()
        if set(parts) - {"scales"}
    ]
    return replaced(tensors, weights)


def _weight(
    module: str, parts: Mapping[str, TensorRange], quantization: Mapping[str, Any], plus_one: bool
) -> EncodedTensor:
    wrong = partial(
        wrong_parts,
        module,
        parts,
        "expected are qweight [in * bits / 32, out] I32, qzeros [groups, out * bits / 32] I32, scales [groups, out] F16, BF16 "
        f"or F32, and g_idx [in] I32 if desc_act is set, with {', '.join(map(str, BITS))} bits",
    )
    in_file = tuple(parts[name] for name in PARTS if name in parts)
    if not set(PARTS[:3]) <= set(parts) or any(len(part.shape) != 2 or 0 in part.shape for part in in_file[:3]):
        raise wrong()
    words, zeros, scales = in_file[:3]
    outputs, groups = words.shape[1], scales.shape[0]
    bits = 32 * zeros.shape[1] // outputs
    if bits not in BITS:
        raise wrong()
    inputs, ordered = words.shape[0] * 32 // bits, groups > 1 and bool(quantization.get("desc_act"))
    group = _group(inputs, groups, quantization.get("group_size"))
    if (
        {part.dtype_name for part in in_file if part is not scales} != {"I32"}
        or scales.dtype_name not in SCALE_DTYPES
        or (32 * zeros.shape[1], zeros.shape[0], scales.shape[1]) != (outputs * bits, groups, outputs)
        or groups > inputs
        or any(part.shape != (inputs,) for part in in_file[3:])
        or (len(in_file) < len(PARTS) and (ordered or group is None))
    ):
        raise wrong()
    in_order = not ordered and group is not None and inputs % group == 0
    group = None if groups == 1 else group
    is_symmetric = quantization.get("sym") is True
    integers = as_integers(bits, group, is_symmetric, in_order)
    encoding = Gptq(bits, group, plus_one, is_symmetric, named("GPTQ", bits, group), integers)
    return EncodedTensor(f"{module}.weight", (outputs, inputs), in_file, encoding)


def _group(inputs: int, groups: int, stated: Any) -> int | None:
    """Return how many inputs follow one another in a group; None: only `g_idx` says it.

    Modules may have another size than config.json states for all.
    """
    if groups == 1:
        return inputs
    if isinstance(stated, int) and stated > 0 and -(-inputs // stated) == groups:
        return stated
    return None if inputs % groups else inputs // groups
