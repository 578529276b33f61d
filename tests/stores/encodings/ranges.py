"""Tensors as a checkpoint's header has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.safetensors_header import TORCH_DTYPES, TensorRange

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def ranges(parts: Mapping[str, torch.Tensor], module: str = "layer") -> dict[str, TensorRange]:
    """The ranges of a module's tensors, which have no place in a file."""
    return {
        f"{module}.{name}": TensorRange(
            f"{module}.{name}", 0, 0, tensor.nbytes, tuple(tensor.shape), _NAMES[tensor.dtype]
        )
        for name, tensor in parts.items()
    }


def in_order(weight: EncodedTensor, parts: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that an encoding decodes."""
    return [parts[part.name.rpartition(".")[2]] for part in weight.parts]


def decoded(
    weight: EncodedTensor, parts: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The weight."""
    out = torch.full(weight.shape, torch.nan, dtype=dtype)
    weight.encoding.decode(in_order(weight, parts), out)
    return out
