"""Compute one token's experts on a GPU like the stock batched_mm, but without the steps whose result is known on the host.

`generate` decodes with batched_mm. For one token, launching its GPU kernels and the Python code between them take
longer than computing. Half of these kernels repeat the token, clamp the ids, or reshape tensors.

Each layer's first token is computed by both kernels and compared (`promoe.experts.kernels.proofs`). Where they differ,
the stock kernel is used from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from promoe.experts.kernels.matrices import SECOND, activate, first_name, has_norm
from promoe.experts.kernels.proofs import proof_of
from promoe.transfer.devices import send
from promoe.transfer.rows import SlotRows


class SlotDecode:
    """Computes one token with the experts of one layer, over the slots of a device.

    Args:
        experts: a module made by Transformers' `use_experts_implementation`.
        stock: the kernel whose bits it must have, `(self, hidden, index, weights)`.
    """

    def __init__(self, experts: nn.Module, stock: Callable[..., torch.Tensor]) -> None:
        self._experts: Any = experts
        self._stock = stock

    def run(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        slots: Sequence[int],
        rows: SlotRows,
        run_stock: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's output `[1, H]`.

        Args:
            hidden: `[1, H]`.
            weights: `[1, K]`.
            slots: the slot of each chosen expert, in the order of `weights`.
            rows: the experts in these slots.
            run_stock: computes the same with the stock kernel. It is called unless this kernel has proved to have the
                same bits.
        """
        proof = proof_of((SlotDecode, self._stock, hidden.dtype, weights.dtype), self._experts)
        if proof.same:
            return self._compute(hidden, weights, slots, rows)
        expected = run_stock()
        if proof.same is None:
            proof.compare(self._compute(hidden, weights, slots, rows), expected)
        return expected

    def _compute(
        self, hidden: torch.Tensor, weights: torch.Tensor, slots: Sequence[int], rows: SlotRows
    ) -> torch.Tensor:
        experts, stacks = self._experts, rows.stacks
        index = send(slots, hidden.device)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            """Multiply `x[K or 1, in]` by each expert's matrix."""
            matrices = stacks[name].index_select(0, index)
            if experts.is_transposed:
                out = torch.bmm(x.unsqueeze(1).expand(len(slots), -1, -1), matrices).squeeze(1)
            else:
                out = torch.bmm(matrices, x.unsqueeze(2).expand(len(slots), -1, -1)).squeeze(2)
            return out.add_(stacks[f"{name}_bias"].index_select(0, index)) if experts.has_bias else out

        raw = linear(hidden, first_name(experts))
        raw = linear(activate(experts, raw), SECOND)
        if has_norm(experts):
            raw = experts.post_expert_norm(raw)
        return (raw * weights.t()).sum(dim=0, keepdim=True).to(hidden.dtype)
