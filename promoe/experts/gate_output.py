"""What a gate returned: which experts it chose, and its logits over them. Found by dtype and shape, never by position."""

from __future__ import annotations

from typing import Any

import torch


def gate_indices(gate_output: Any, index_like: torch.Tensor | None = None) -> torch.Tensor | None:
    """The chosen experts' ids `[T, K]` in a gate's output, found by dtype: their position differs between versions.

    Args:
        gate_output: what the gate's forward returned, a tensor or a tuple.
        index_like: the index that the experts were really given, where known: settles which of several integer tensors
            it is, by storage.

    Returns:
        The int64 ids, one row per token; None where the output has none, or several that cannot be told apart.
    """
    outputs = gate_output if isinstance(gate_output, (tuple, list)) else (gate_output,)
    found = [x for x in outputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.ndim >= 2]
    if index_like is not None and len(found) > 1:
        found = [x for x in found if x.data_ptr() == index_like.data_ptr() and x.numel() == index_like.numel()]
    if len(found) != 1:
        return None
    return found[0] if found[0].ndim == 2 else found[0].reshape(-1, found[0].shape[-1])


def gate_logits(output: Any, num_experts: int) -> torch.Tensor | None:
    """The first floating tensor `[..., num_experts]` of a gate's output: logits, or what stands for them."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == num_experts:
            return part
    return None
