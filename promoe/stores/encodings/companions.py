"""Weights in fewer bits whose other tensors (scales, zeros, groups) are missing, have another name or do not fit.

Codes without their scales look like a weight: read as they are, they are wrong by the scales' factors. So each is refused,
with what stands beside it in the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, StoredTensor
from promoe.stores.safetensors_header import TensorRange

_MOST_SHOWN = 6
# What a weight of these dtypes needs beside it.
_NEEDED = {
    "F8": "weight_scale_inv (quant_method fp8, mxfp8) or weight_scale (compressed-tensors)",
    "I8": "weight_scale (compressed-tensors)",
    "U8": "weight_scale (compressed-tensors), or blocks and scales (mxfp4)",
    "I32": "scales and qzeros (AWQ, GPTQ) or weight_scale (compressed-tensors)",
}
# Parts of the names of tensors that change what codes mean, unless they are those of activations or the KV cache.
_CHANGES_CODES = re.compile(r"scale|zero|idx|perm|codebook")
_OF_ACTIVATIONS = re.compile(r"(^|_)(input|output|activation|act|k|v|q|kv)(_|$)")
WHAT_TO_DO = (
    "The checkpoint is damaged or incomplete, or in another format: compare the files and config.json with the original "
    "ones, or open another checkpoint of the model."
)


def described(tensors: Iterable[StoredTensor]) -> str:
    """Return names, shapes and dtypes of tensors for a message; the first ones if there are many."""
    found = [f"{tensor.name} {list(tensor.shape)} {tensor.dtype_name}" for tensor in tensors]
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return ", ".join(found[:_MOST_SHOWN]) + more or "nothing"


def beside(tensors: Mapping[str, StoredTensor], name: str) -> list[StoredTensor]:
    """Return the other tensors of the module that a tensor belongs to. Those that begin like it come first."""
    module = name.rpartition(".")[0] + "."
    found = [tensor for other, tensor in tensors.items() if other.startswith(module) and other != name]
    return sorted(found, key=lambda tensor: not tensor.name.startswith(name))


def where(tensor: TensorRange) -> str:
    """Return the file that a tensor is in, for a message; empty if it is not known."""
    return f" in {tensor.file_name}" if tensor.file_name else ""


def undecoded(tensor: TensorRange, tensors: Mapping[str, StoredTensor], expected: str) -> CheckpointError:
    """Return the error to raise if a weight would be read as its codes.

    Args:
        tensor: the codes.
        tensors: all tensors of the checkpoint, by name.
        expected: what it would become.
    """
    kind = tensor.dtype_name.partition("_")[0]
    needed = f" Such a weight needs {_NEEDED[kind]} beside it." if kind in _NEEDED else ""
    found = described(beside(tensors, tensor.name))
    return CheckpointError(
        f"The checkpoint's {tensor.name!r} has dtype {tensor.dtype_name}{where(tensor)}, but {expected} was expected.{needed} "
        f"Found beside it: {found}. A tensor is missing or has another name, or the checkpoint is "
        "quantised in a way that cannot be read: open another one of the model, or an unquantised (BF16, F16 or F32) one."
    )


def check_companions(tensors: Mapping[str, StoredTensor], unused: Collection[str]) -> None:
    """Raise CheckpointError if an unknown tensor beside a weight in fewer bits could change what its codes mean.

    Args:
        tensors: all tensors of the checkpoint, by the names that they would have in 16 bits.
        unused: the names of those that hold no part of the model.
    """
    for name in sorted(unused):
        module, _, own = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if not isinstance(weight, EncodedTensor) or weight.name in unused:
            continue
        if _CHANGES_CODES.search(own) and not _OF_ACTIVATIONS.search(own):
            raise CheckpointError(
                f"The checkpoint's {weight.name!r} is in {weight.dtype_name}, which is decoded from "
                f"{described(weight.parts)}. Beside them is {described([tensors[name]])}, which that format does not have: "
                f"the weight could be wrong without it. {WHAT_TO_DO}"
            )
