"""Opens the unmodified model, which every system is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from promoe.model.gguf.finding import is_gguf
from promoe.model.model_class import class_to_open
from promoe.runtime.loading import from_pretrained
from promoe.runtime.patching import unpatch
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_stock(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Open a checkpoint as Transformers does, in eval mode, with its tensors aligned as slots are.

    The bits of a product can depend on the alignment of its operands. Transformers maps some tensors straight from the
    file, at any address; those are copied to aligned memory. From GGUF files, Transformers makes a model of other
    weights for some families, so they are read as promoe reads them, and decoded.

    Args:
        checkpoint: folder of a checkpoint, or a GGUF file.
        dtype: of the weights.
    """
    if is_gguf(checkpoint):
        return unpatch(from_pretrained(checkpoint, dtype=dtype, cache="100%", experts="checkpoint", predictor=None))
    # promoe opens it in the same way: without code of the checkpoint, and without pickle.
    options = {"trust_remote_code": False, "use_safetensors": True}
    model: Any = class_to_open(checkpoint, options).from_pretrained(checkpoint, dtype=dtype, **options).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.data_ptr() % SLOT_ALIGNMENT_BYTES:
                tensor.data = tensor.data.clone()
    result: PreTrainedModel = model
    return result
