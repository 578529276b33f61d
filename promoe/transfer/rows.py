"""Experts in slots as kernels read them: the types that engine, pools and kernels share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from promoe.stores.slot_format import MatrixFormat, SlotMatrix

# One of an expert's tensors: shaped like one row of the model's stack, or a matrix in another format.
Row: TypeAlias = torch.Tensor | SlotMatrix
# For each expert that can be used now: its tensors by parameter name.
ExpertRows: TypeAlias = Mapping[int, Mapping[str, Row]]


class FirstRows(dict[int, Mapping[str, Row]]):
    """Experts of which only the first tensors have arrived. They come again when all of them have; these may be ignored."""


class FormattedRows(dict[int, Mapping[str, Row]]):
    """Experts in slots of one pool on a device, some of whose matrices are in other formats. Kernels read copies of them.

    Args:
        slots: expert id -> its slot.
        stacks: that tensor of every slot by parameter name, `[num_slots, ...]`, or its bytes, `[num_slots, nbytes]`.
        formats: of the tensors that are bytes, by parameter name.
    """

    def __init__(
        self, slots: Mapping[int, int], stacks: Mapping[str, torch.Tensor], formats: Mapping[str, MatrixFormat]
    ) -> None:
        super().__init__({expert: {} for expert in slots})  # nothing that a kernel could read by mistake
        self.slots = slots
        self.stacks = stacks
        self.formats = formats

    def split(self, most: int) -> Iterator[FormattedRows]:
        """Yield these experts in ascending order, up to `most` at a time."""
        experts = sorted(self)
        for start in range(0, len(experts), most):
            part = {expert: self.slots[expert] for expert in experts[start : start + most]}
            yield FormattedRows(part, self.stacks, self.formats)


class SlotRows(dict[int, Mapping[str, torch.Tensor]]):
    """Expert id -> its tensors by parameter name, all in slots of one pool on a device, or in copies of slots.

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
