"""Expand quantised experts on a device, so that the stock kernels multiply by them.

A call's experts are expanded to the model's dtype into copies that last as long as the call. So the output is that of
the model whose experts are these copies, computed by the stock kernels on this device.

The copies come from torch's allocator, new for each call. It reuses memory in the order of the kernels that read it:
what a later call expands never overwrites what a kernel before it still reads, and calls of two threads or streams get
different memory. Layers with one layout reuse the same blocks, so a model takes the memory of one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from promoe.experts.kernels.quantized import Quantized
from promoe.transfer.devices import send
from promoe.transfer.rows import ExpertRows, FormattedRows, SlotRows

# Memory for expanded experts, unless those of one token take more. More experts are computed in several groups.
EXPANDED_BYTES = 256 * 2**20


def most_expanded(expert_bytes: int, top_k: int) -> int:
    """Return how many experts are expanded at a time, at most. The experts of one token always are.

    Args:
        expert_bytes: size of an expanded expert.
        top_k: experts per token K.
    """
    return max(top_k, EXPANDED_BYTES // expert_bytes)


def split(groups: Iterable[ExpertRows], most: int) -> Iterator[ExpertRows]:
    """Yield groups with at most so many experts that have to be expanded. Other groups stay as they are."""
    for rows in groups:
        if isinstance(rows, FormattedRows):
            yield from rows.split(most)
        else:
            yield rows


def expanded(rows: FormattedRows, device: torch.device) -> SlotRows:
    """Return copies of experts as the model has them, in ascending order, as if they were the slots of a pool.

    The calling thread's queue does it, after the copies into the slots and before the kernels that it is given next.
    The host does not wait.
    """
    experts = sorted(rows)
    slots = send([rows.slots[expert] for expert in experts], device)
    stacks = {name: stack.index_select(0, slots) for name, stack in rows.stacks.items()}
    for name, matrix_format in rows.formats.items():
        assert isinstance(matrix_format, Quantized), matrix_format
        stacks[name] = matrix_format.dense(matrix_format.parts(stacks[name]))
    each = zip(*(stack.unbind() for stack in stacks.values()), strict=True)
    views = [dict(zip(stacks, tensors, strict=True)) for tensors in each]
    return SlotRows(
        dict(zip(experts, views, strict=True)), {expert: place for place, expert in enumerate(experts)}, stacks
    )
