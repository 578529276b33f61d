"""AutoRound (`quant_method` "auto-round"): its `packing_format` says whether tensors are GPTQ's or AWQ's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promoe.errors import CheckpointError
from promoe.stores.encodings.awq import find_awq
from promoe.stores.encodings.base import StoredTensor
from promoe.stores.encodings.gptq import find_gptq
from promoe.stores.safetensors_header import TensorRange

_GPTQ, _AWQ = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round:auto_awq", "auto_round:awq")


def find_auto_round(tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the parts of each weight as one.

    Raises:
        CheckpointError: the packing format is another one, or a weight's tensors do not belong together.
    """
    packing = str(quantization.get("packing_format") or quantization.get("backend"))
    if packing in _GPTQ:
        return find_gptq(tensors, {**quantization, "checkpoint_format": "gptq"})
    if packing in _AWQ:
        return find_awq(tensors, {**quantization, "version": "gemm"})
    raise CheckpointError(
        f"The checkpoint is in the packing format {packing[:60]!r} of AutoRound. Only {', '.join((*_GPTQ, *_AWQ))} can be "
        'read: open another checkpoint of the model, or the original one in 16 bits, with experts="int4" (`promoe quantize`).'
    )
