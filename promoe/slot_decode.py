"""One token's experts on a GPU: what the stock grouped_mm does, less what it does to find out what the host knows already.

For one token the stock kernel launches about thirty kernels per layer, half of them to sort four ids, to count them, and to put
the rows back; where launching takes longer than computing, that is what a token costs. The host has the ids, so it sends the
order along with the ends of the groups.

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

from promoe.devices import send
from promoe.slot_rows import MAX_GROUPS, SlotRows

logger = logging.getLogger(__name__)

Verdicts = dict[tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype], bool]
# Of each experts module: (stock function, dtype of hidden, of the routing weights) -> were the bits the same.
_VERDICTS: WeakKeyDictionary[nn.Module, Verdicts] = WeakKeyDictionary()

ALIGNMENT = 4  # of int32 numbers, which kernels read 16 bytes at a time


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
        window = max(slots) - min(slots) + 1
        has_norm = getattr(self._experts, "has_post_expert_norm", False)  # Transformers has it from 5.20 on
        if verdict is False or has_norm or window > MAX_GROUPS or len(set(slots)) < len(slots):
            return run_stock()
        if verdict:
            return self._compute(hidden, weights, slots, rows)
        expected = run_stock()
        found = self._compute(hidden, weights, slots, rows)
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        if same or not bool(expected.isnan().any()):  # what is no number differs from itself, and says nothing
            self._verdicts[key] = same
        if not same:
            logger.info(
                "%s: a token's bits are not those of the stock kernel, which is used", type(self._experts).__name__
            )
        return expected

    def _compute(
        self, hidden: torch.Tensor, weights: torch.Tensor, slots: Sequence[int], rows: SlotRows
    ) -> torch.Tensor:
        experts, count = self._experts, len(slots)
        by_slot = sorted(range(count), key=slots.__getitem__)
        in_order = [slots[place] for place in by_slot]
        back = [0] * count
        for row, place in enumerate(by_slot):
            back[place] = row
        first, last = in_order[0], in_order[-1]
        ends: list[int] = []
        for number, slot in enumerate([*in_order[1:], last + 1], 1):
            ends += [number] * (slot - first - len(ends))
        numbers = [*back, *in_order, *[0] * (-2 * count % ALIGNMENT), *ends]
        sent = send(torch.tensor(numbers, dtype=torch.int32, device="cpu"), hidden.device)
        offs = sent[-len(ends) :]

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            stack = rows.stacks[name][first : last + 1]
            out = torch._grouped_mm(x.to(stack.dtype), stack if experts.is_transposed else stack.mT, offs=offs)
            return out.add_(rows.stacks[f"{name}_bias"][sent[count : 2 * count]]) if experts.has_bias else out

        x = hidden.expand(count, -1).contiguous()
        raw = linear(x, "gate_up_proj" if experts.has_gate else "up_proj")
        raw = linear(experts._apply_gate(raw) if experts.has_gate else experts.act_fn(raw), "down_proj")
        weighted = raw[sent[:count]] * weights.reshape(-1, 1)
        return weighted.unsqueeze(0).sum(dim=1).to(hidden.dtype)
