"""The quantised checkpoints that can be read: which tensors of the files make up each weight.

A checkpoint's `quantization_config` names its `quant_method`. Each method has a function here that returns the
checkpoint's tensors as if it were in 16 bits: a weight in fewer bits is one `EncodedTensor` with the weight's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from promoe.stores.encodings.base import StoredTensor
from promoe.stores.encodings.fp8 import find_fp8
from promoe.stores.encodings.mxfp4 import find_mxfp4
from promoe.stores.safetensors_header import TensorRange

Find = Callable[[Mapping[str, TensorRange], Mapping[str, Any]], dict[str, StoredTensor]]

# By quant_method.
SCHEMES: dict[str, Find] = {"fp8": find_fp8, "mxfp4": find_mxfp4}


def find_weights(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any] | None
) -> dict[str, StoredTensor]:
    """Return the weights of a checkpoint by the names that they would have in 16 bits.

    Args:
        tensors: of the files, by name.
        quantization: the checkpoint's `quantization_config`, of a method in `SCHEMES`; None: it is not quantised.

    Raises:
        CheckpointError: tensors do not belong together, or are in a variant of the method that cannot be read.
    """
    if quantization is None:
        return dict(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, TensorRange)}
    return SCHEMES[quantization["quant_method"]](plain, quantization)
