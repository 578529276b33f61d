"""Experts in slots as kernels read them: the types that engine, pools and kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from promoe.stores.slot_format import SlotMatrix

# One of an expert's tensors: shaped like one row of the model's stack, or a matrix in another format.
Row: TypeAlias = torch.Tensor | SlotMatrix
# For each expert that can be used now: its tensors by parameter name.
ExpertRows: TypeAlias = Mapping[int, Mapping[str, Row]]


class FirstRows(dict[int, Mapping[str, Row]]):
    """Experts of which only the first tensors have arrived. They come again when all of them have; these may be ignored."""


class SlotRows(dict[int, Mapping[str, torch.Tensor]]):
    """Expert id -> its tensors by parameter name, all in slots of one pool on a device.

    Args:
        rows: expert id -> its tensors.
        slots: expert id -> its slot.
        stacks: that tensor of every slot by parameter name, `[num_slots, ...]`.
    """

    def __init__(
        self,
        rows: Mapping[int, Mapping[str, torch.Tensor]],
        slots: Mapping[int, int],
        stacks: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(rows)
        self.slots = slots
        self.stacks = stacks

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return len(next(iter(self.stacks.values())))

    def slots_of(self, experts: Sequence[int]) -> list[int]:
        """Return the slot of each expert.

        Raises:
            AssertionError: one was not made ready for this call.
        """
        try:
            return [self.slots[expert] for expert in experts]
        except KeyError as error:
            raise AssertionError(f"expert {error} has no slot here; ready: {sorted(self.slots)}") from None
