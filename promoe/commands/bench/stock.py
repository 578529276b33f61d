"""Opens the unmodified model, which every system is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from promoe.model.model_class import class_to_open
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_stock(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Open a checkpoint as Transformers does, in eval mode, with its tensors aligned as slots are.

    The bits of a product can depend on the alignment of its operands. Transformers maps some tensors straight from the
    file, at any address; those are copied to aligned memory.

    Args:
        checkpoint: folder of a safetensors checkpoint.
        dtype: of the weights.
    """
    # promoe opens it in the same way: without code of the checkpoint, and without pickle.
    options = {"trust_remote_code": False, "use_safetensors": True}
    model: Any = class_to_open(checkpoint, options).from_pretrained(checkpoint, dtype=dtype, **options).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.data_ptr() % SLOT_ALIGNMENT_BYTES:
                tensor.data = tensor.data.clone()
    result: PreTrainedModel = model
    return result
