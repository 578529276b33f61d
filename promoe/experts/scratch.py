"""Memory that a thread computes a long prompt's pairs in, part after part and layer after layer."""

from __future__ import annotations

import threading

import torch

from promoe.transfer.memory import HugePageRegion

# What a thread keeps for its next call, so that no page of it has to come from the system again.
KEPT_BYTES = 32 * 2**20
_kept = threading.local()


def _region_of_thread(nbytes: int) -> HugePageRegion:
    if nbytes > KEPT_BYTES:
        return HugePageRegion(nbytes)
    region: HugePageRegion | None = getattr(_kept, "region", None)
    if region is None or region.nbytes < nbytes:
        return HugePageRegion(nbytes)
    _kept.region = None  # a call within this one, from a hook, gets its own
    return region


class PartSpace:
    """Memory for one part of a call's pairs after another. A thread keeps one of up to `KEPT_BYTES`, once it is released.

    Not the allocator's: its blocks would have as many sizes as there are parts, and leave holes that fit no other, the more so
    as oneDNN keeps something small for each new number of rows. After some prompts of 1,900 tokens those were a gigabyte.

    Args:
        num_rows: of the largest part.
        hidden_size: H.
        first_width: columns of the first product.
        second_width: columns that the second one reads, I.
        dtype: of all.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, first_width: int, second_width: int, dtype: torch.dtype
    ) -> None:
        widths = (hidden_size, first_width, second_width)
        region = self._region = _region_of_thread(num_rows * sum(widths) * dtype.itemsize)
        self._tensors: list[torch.Tensor] = []
        offset_bytes = 0
        for width in widths:
            self._tensors.append(region.tensor(offset_bytes, (num_rows, width), dtype))
            offset_bytes += num_rows * width * dtype.itemsize

    def release(self) -> None:
        """The call is over: the thread's next one may have it."""
        if self._region.nbytes <= KEPT_BYTES:
            _kept.region = self._region

    def of(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """`[P, H]`, `[P, first width]`, `[P, I]`."""
        return tuple(tensor[:num_rows] for tensor in self._tensors)
