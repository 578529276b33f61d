"""The tensors of GGUF files as weights: those in blocks, such as Q4_K, are decoded when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, StoredTensor
from promoe.stores.encodings.gguf_blocks import block_encoding
from promoe.stores.gguf_header import BLOCKS
from promoe.stores.safetensors_header import TensorRange


def find_blocks(tensors: Mapping[str, TensorRange]) -> dict[str, StoredTensor]:
    """Return the tensors of GGUF files, with those in blocks as weights to be decoded.

    Raises:
        CheckpointError: a tensor is in blocks that cannot be decoded.
    """
    return {name: _encoded(tensor) if tensor.dtype_name in BLOCKS else tensor for name, tensor in tensors.items()}


def _encoded(tensor: TensorRange) -> EncodedTensor:
    kind, block_elements, block_bytes = BLOCKS[tensor.dtype_name]
    encoding = block_encoding(kind)
    if encoding is None:
        raise CheckpointError(
            f"The checkpoint's {tensor.name!r} is in {tensor.dtype_name} (GGUF type {kind}), which cannot be decoded. Open a "
            "file of the model in another form, such as Q4_K_M or Q8_0."
        )
    *lead, columns = tensor.shape
    shape = (*lead, columns // block_elements * block_bytes)
    blocks = replace(tensor, shape=shape, dtype_name="U8")
    return EncodedTensor(tensor.name, tensor.shape, (blocks,), encoding)
