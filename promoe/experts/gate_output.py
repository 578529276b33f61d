"""Read a gate's output: the chosen experts and the logits. They are found by dtype and shape, never by position."""

from __future__ import annotations

from typing import Any

import torch


def gate_indices(gate_output: Any) -> torch.Tensor | None:
    """Return the ids `[T, K]` of the experts that a gate chose. Their position differs between versions of Transformers.

    Args:
        gate_output: what the gate's forward returned, a tensor or a tuple.

    Returns:
        The int64 ids, one row per token; None if the output has no integer tensor, or several.
    """
    outputs = gate_output if isinstance(gate_output, (tuple, list)) else (gate_output,)
    found = [x for x in outputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.ndim >= 2]
    if len(found) != 1:
        return None
    return found[0] if found[0].ndim == 2 else found[0].reshape(-1, found[0].shape[-1])


def gate_logits(output: Any, num_experts: int) -> torch.Tensor | None:
    """Return the first floating-point tensor `[..., num_experts]` of a gate's output (logits or scores); None: no such."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == num_experts:
            return part
    return None
