"""One token's experts on a GPU: what the stock batched_mm does, with what the host knows already.

`generate` decodes with batched_mm. For one token, launching its kernels takes longer than computing, and so does Python between
them: half of these repeat the token, clamp the ids, or give tensors other shapes.

Whether that gives the bits of the stock kernel is not taken for granted: each layer's first token is computed both ways and
compared. Where they differ, the stock kernel is used for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from promoe.transfer.devices import send
from promoe.transfer.rows import SlotRows

logger = logging.getLogger(__name__)

Verdicts = dict[tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype], bool]
# Of each experts module: (stock function, dtype of hidden, of the routing weights) -> were the bits the same.
_VERDICTS: WeakKeyDictionary[nn.Module, Verdicts] = WeakKeyDictionary()


class SlotDecode:
    """The experts of one layer, for one token.

    Args:
        experts: a module with the attributes that `use_experts_implementation` of transformers gives it.
        stock: the kernel that it has to agree with: `(self, hidden, index, weights)`.
    """

    def __init__(self, experts: nn.Module, stock: Callable[..., torch.Tensor]) -> None:
        self._experts: Any = experts
        self._stock = stock
        self._verdicts = _VERDICTS.setdefault(experts, {})

    def run(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        slots: Sequence[int],
        rows: SlotRows,
        run_stock: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The layer's output `[1, H]`.

        Args:
            hidden: `[1, H]`.
            weights: `[1, K]`.
            slots: of each chosen expert, in the order of `weights`.
            rows: that have these slots.
            run_stock: the same by the stock kernel, for where this cannot be had, or has still to be compared.
        """
        key = self._stock, hidden.dtype, weights.dtype
        verdict = self._verdicts.get(key)
        if verdict:
            return self._compute(hidden, weights, slots, rows)
        expected = run_stock()
        if verdict is None:
            found = self._compute(hidden, weights, slots, rows)
            same = found.dtype == expected.dtype and torch.equal(found, expected)
            if same or not bool(expected.isnan().any()):  # what is no number differs from itself, and says nothing
                self._verdicts[key] = same
        return expected

    def _compute(
        self, hidden: torch.Tensor, weights: torch.Tensor, slots: Sequence[int], rows: SlotRows
    ) -> torch.Tensor:
        experts, stacks = self._experts, rows.stacks
        index = send(slots, hidden.device)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            """Of `x[K or 1, in]`."""
            matrices = stacks[name].index_select(0, index)
            if experts.is_transposed:
                out = torch.bmm(x.unsqueeze(1).expand(len(slots), -1, -1), matrices).squeeze(1)
            else:
                out = torch.bmm(matrices, x.unsqueeze(2).expand(len(slots), -1, -1)).squeeze(2)
            return out.add_(stacks[f"{name}_bias"].index_select(0, index)) if experts.has_bias else out

        raw = linear(hidden, "gate_up_proj" if experts.has_gate else "up_proj")
        raw = linear(experts._apply_gate(raw) if experts.has_gate else experts.act_fn(raw), "down_proj")
        if getattr(experts, "has_post_expert_norm", False):  # Transformers has it from 5.20 on
            raw = experts.post_expert_norm(raw)
        return (raw * weights.t()).sum(dim=0, keepdim=True).to(hidden.dtype)
