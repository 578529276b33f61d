"""The quantised checkpoints that can be read: which tensors of the files make up each weight.

A checkpoint's `quantization_config` names its `quant_method`. Each method has a function here that returns the
checkpoint's tensors as if it were in 16 bits: a weight in fewer bits is one `EncodedTensor` with the weight's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promoe.errors import CheckpointError
from promoe.stores.encodings.auto_round import find_auto_round
from promoe.stores.encodings.awq import find_awq
from promoe.stores.encodings.base import Integers, StoredTensor
from promoe.stores.encodings.companions import beside, described
from promoe.stores.encodings.compressed_tensors import find_compressed_tensors
from promoe.stores.encodings.compressed_tensors_schemes import module_bits, module_integers
from promoe.stores.encodings.fp8 import find_fp8
from promoe.stores.encodings.gptq import find_gptq
from promoe.stores.encodings.mxfp4 import find_mxfp4
from promoe.stores.encodings.packed_integers import WrongPartsError, stated_bits, stated_integers
from promoe.stores.safetensors_header import TensorRange


@dataclass(frozen=True)
class Method:
    """A way to quantise checkpoints.

    Attributes:
        find: returns a checkpoint's tensors as if it were in 16 bits, given those of its files and its
            `quantization_config`.
        bits: returns the bits of a weight in the files, scales included, given the `quantization_config` and the names that
            its module may have; None: it does not say so.
        integers: returns what `Encoding.integers` are for a weight, given the same.
    """

    find: Callable[[Mapping[str, TensorRange], Mapping[str, Any]], dict[str, StoredTensor]]
    bits: Callable[[Mapping[str, Any], Sequence[str]], float | None]
    integers: Callable[[Mapping[str, Any], Sequence[str]], Integers | None] = lambda quantization, modules: None


# By quant_method.
SCHEMES: dict[str, Method] = {
    "fp8": Method(find_fp8, lambda quantization, modules: 8.0),
    "mxfp8": Method(find_fp8, lambda quantization, modules: 8.25),
    "mxfp4": Method(find_mxfp4, lambda quantization, modules: 4.25),
    "compressed-tensors": Method(find_compressed_tensors, module_bits, module_integers),
    "awq": Method(find_awq, stated_bits, stated_integers),
    "gptq": Method(find_gptq, stated_bits, stated_integers),
    "auto-round": Method(find_auto_round, stated_bits, stated_integers),
    "intel/auto-round": Method(find_auto_round, stated_bits, stated_integers),
}


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
    try:
        return SCHEMES[quantization["quant_method"]].find(plain, quantization)
    except WrongPartsError as error:
        others = [one for one in beside(plain, f"{error.module}.") if one.name not in error.known]
        raise CheckpointError(f"{error} Found beside them: {described(others)}.") from error
