"""Grouped products over the slots of a device. This module knows nothing of models.

All slots of a pool are one allocation, a fixed distance apart. So each of their tensors is a stack `[num_slots, ...]`,
and torch's grouped product runs over it like over the model's stack of experts. If there are more slots than a grouped
kernel accepts, rows are put into the order of slots, multiplied window by window, and put back into their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch

from promoe.transfer.devices import send

# On CUDA, torch prepares a grouped product in one block, with one thread for each group.
MAX_GROUPS = 1023


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies groups of rows without waiting for the device.

    Some GPUs have one kernel for all groups. On others, torch multiplies the groups one by one, and has to wait for
    their sizes.
    """
    if device.type != "cuda":
        return True  # torch multiplies the groups one by one, but does not have to wait
    return dtype == torch.bfloat16 and _capability(device)[0] in (9, 10)  # H100, B200


def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a GPU of the Hopper generation (H100, H200)."""
    return device.type == "cuda" and _capability(device)[0] == 9


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class SlotOrder:
    """The order of groups of rows by slot, and the order to restore.

    Args:
        slots: the slot of each group, in the order of their rows. There is at least one, and none occurs twice.
        sizes: the number of rows of each group, at least one.
        device: the device of the rows.
    """

    def __init__(self, slots: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        ends = list(accumulate(sizes))
        by_slot = sorted(zip(slots, ends, sizes, strict=True))
        windows = list(_windows([slot for slot, _, _ in by_slot], [size for _, _, size in by_slot]))
        self._sizes = [ends[-1] for _, ends in windows]
        self._windows = [
            (first, send(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)) for first, ends in windows
        ]
        self._there: torch.Tensor | None = None
        self._back: torch.Tensor | None = None
        if any(one > other for one, other in pairwise(slots)):
            there = torch.cat([torch.arange(end - size, end, device="cpu") for _, end, size in by_slot])
            back = torch.empty_like(there)
            back[there] = torch.arange(len(there), device="cpu")
            self._there, self._back = send(torch.stack([there, back]), device)

    def multiply(self, x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Multiply `x[S, in]` by each group's matrix in `stack[num_slots, in, out]`; return `[S, out]`."""
        if self._there is not None:
            x = x[self._there]
        products = [
            torch._grouped_mm(rows, stack[first : first + len(ends)], offs=ends)
            for rows, (first, ends) in zip(x.split(self._sizes), self._windows, strict=True)
        ]
        out = products[0] if len(products) == 1 else torch.cat(products)
        return out if self._back is None else out[self._back]


def _windows(slots: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield ranges of up to `MAX_GROUPS` slots that hold all of `slots` (ascending): first slot, ends of the rows."""
    first, in_window = slots[0], [0]
    for slot, size in zip(slots, sizes, strict=True):
        if slot - first >= MAX_GROUPS:
            yield first, list(accumulate(in_window))
            first, in_window = slot, [0]
        in_window += [0] * (slot - first + 1 - len(in_window))
        in_window[-1] = size
    yield first, list(accumulate(in_window))
