"""Memory in which a thread computes the pairs of a long prompt, reused for each part and each layer."""

from __future__ import annotations

import threading

import torch

from promoe.transfer.memory import HugePageRegion

# The most that a thread keeps for its next call, so that the system does not have to provide these pages again.
KEPT_BYTES = 32 * 2**20
_kept = threading.local()


def _region_of_thread(nbytes: int) -> HugePageRegion:
    if nbytes > KEPT_BYTES:
        return HugePageRegion(nbytes)
    region: HugePageRegion | None = getattr(_kept, "region", None)
    if region is None or region.nbytes < nbytes:
        return HugePageRegion(nbytes)
    _kept.region = None  # a hook may call the experts within this call, and then needs a region of its own
    return region


class PartSpace:
    """Memory for the parts of a call's pairs, one after the other.

    After `release`, the thread keeps it for its next call if it has at most `KEPT_BYTES`. It does not come from the
    allocator. Blocks of the allocator would have another size for each part, and would leave holes between the small
    objects that oneDNN keeps for each new number of rows. After some prompts of 1,900 tokens, these holes took a
    gigabyte.

    Args:
        num_rows: number of rows of the largest part.
        hidden_size: H.
        first_width: columns of the first product.
        second_width: columns of the second product's input, I.
        dtype: dtype of all tensors.
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
        """Keep the memory for the thread's next call, unless it is too large. The tensors must not be used any more."""
        if self._region.nbytes <= KEPT_BYTES:
            _kept.region = self._region

    def of(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Return tensors `[P, H]`, `[P, first width]` and `[P, I]` for P = `num_rows` rows."""
        return tuple(tensor[:num_rows] for tensor in self._tensors)
