"""The one place that chooses which kernels compute a call of a layer's experts.

* The **stock kernel** (the model's own) computes everything that no other kernel does. It runs over stand-ins for the
stacks of
  experts (`bank`), or, on a device, over the pool's slots (`slot_windows`).
* The **row kernel** (`row_kernel`) computes the rows of groups of experts on the processor, where `grouped_mm` is in
force.
* **Slot decode** (`slot_decode`) computes one token on a device, where `batched_mm` is in force.

The last two are used only once they have proved to have the stock kernel's bits (`proofs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from promoe.experts.activation import depends_on_shape
from promoe.experts.kernels.bank import CallRows, SlotBank
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.kernels.slot_decode import SlotDecode
from promoe.experts.kernels.slot_windows import MAX_GROUPS, has_grouped_kernel
from promoe.experts.moe_layers import MoELayer
from promoe.experts.pairs import FEW_PAIRS
from promoe.transfer.devices import send
from promoe.transfer.rows import ExpertRows, SlotRows

# `mkldnn_gemm_min_size` of ATen's use_mkldnn_matmul: a batch with more multiplications than this goes to oneDNN.
BMM_ONEDNN_ELEMENTS = 16**3
# The widest intermediate of a part of a long prompt's rows takes this much; up to twice as much is left to one call. A
# block of more than 32 MiB (glibc) comes from the system and goes back to it in every layer, page by page: about a
# third of such a layer's time.
PART_BYTES = 8 * 2**20

NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


class Kernels:
    """The kernels of one call.

    Attributes:
        row_dtype: dtype of a row before it is weighted.
        depends_on_groups: whether the last bits may depend on which experts run together (see
        `promoe.experts.activation`).
        rows: computes the rows of groups in place of the stock kernel; None: the stock kernel does.
        by_rows: whether `rows` is better than one stock call also when all experts are there.

    Args:
        layer: whose experts are called.
        implementation: the experts implementation in force.
        hidden: `[T, H]`, the experts' input.
        num_pairs: T * K.
        on_device: whether the layer computes on a device.
    """

    __slots__ = ("_implementation", "_layer", "by_rows", "depends_on_groups", "part_pairs", "row_dtype", "rows")

    def __init__(
        self, layer: MoELayer, implementation: str, hidden: torch.Tensor, num_pairs: int, on_device: bool
    ) -> None:
        self._layer = layer
        self._implementation = implementation
        self.row_dtype = _row_dtype(layer, implementation, hidden)
        # On a device the bits of a grouped kernel need not be those of products one by one: there the stock kernel does
        # it all.
        self.depends_on_groups = (
            not on_device
            and implementation != "eager"  # computes expert by expert in any case
            and depends_on_shape(layer.experts, layer.activation_width, self.row_dtype, layer.row_sizes, num_pairs)
        )
        self.part_pairs = 0
        self.rows: RowKernel | None = None
        self.by_rows = False
        if implementation == "grouped_mm" and not on_device and not self.depends_on_groups:
            self._choose_rows(hidden, num_pairs)

    def _choose_rows(self, hidden: torch.Tensor, num_pairs: int) -> None:
        layer = self._layer
        if not layer.adapter.sums_rows or not num_pairs:
            return
        stock, few = layer.stock_forward_of(self._implementation), num_pairs <= FEW_PAIRS
        kernel = RowKernel(layer.experts, stock, hidden.dtype, self.row_dtype, few)
        if kernel.proven is not False:
            widest_bytes = max(layer.activation_width, hidden.shape[-1]) * layer.stacked_shapes[0][2].itemsize
            self.part_pairs = max(1, PART_BYTES // widest_bytes)
            self.rows, self.by_rows = kernel, few or num_pairs > 2 * self.part_pairs

    def begins(self, num_pairs: int) -> bool:
        """Return whether the first tensors of an expert are of use while its last ones are on their way."""
        return self.rows is not None and bool(self.rows.proven) and num_pairs <= FEW_PAIRS

    @property
    def fewest_rows(self) -> int:
        """The smallest batch size from which torch.bmm always takes the same path; 1 where it is not used.

        A batch of one is a product of two matrices, and oneDNN takes over from `BMM_ONEDNN_ELEMENTS` multiplications
        on: other orders of addition, hence other bits.
        """
        if self._implementation != "batched_mm":
            return 1
        smallest = min(math.prod(shape[1:]) for _, shape, _ in self._layer.stacked_shapes if len(shape) > 2)
        return max(2, BMM_ONEDNN_ELEMENTS // smallest + 1)

    def stock(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        rows: ExpertRows,
        ids: Sequence[int] | None,
        attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    ) -> torch.Tensor:
        """Compute `hidden[T, H]`, `index[T, K]`, `weights[T, K]` by the stock kernel over `rows`; return `[T, H]`.

        Args:
            hidden: as the module is given it.
            index: as the module is given it.
            weights: as the module is given it.
            rows: every expert in `index`.
            ids: the flattened `index` as a list, where the caller has it already.
            attributes: take the place of the experts module's own.
        """
        if ids and isinstance(rows, SlotRows) and self._reads_slots(hidden, rows):
            return self._over_slots(hidden, weights, rows, rows.slots_of(ids), attributes)
        return self._over_stand_ins(hidden, index, weights, rows, ids, attributes)

    def _reads_slots(self, hidden: torch.Tensor, rows: SlotRows) -> bool:
        """Return whether the stock kernel can take a pool's slots for the experts, and their numbers for the ids.

        Its loop (eager) adds in the order of the ids. The other kernels sort by them: the rows of an expert then come
        in another order, on which their bits do not depend on a GPU.
        """
        layer, implementation = self._layer, self._implementation
        if implementation == "eager" or not layer.adapter.sums_rows or layer.num_ids > layer.num_experts:
            return False
        if len(hidden) > 1 and not hidden.is_cuda:
            return False
        if implementation == "batched_mm":
            return True
        return rows.num_slots <= MAX_GROUPS and has_grouped_kernel(hidden.device, layer.stacked_shapes[0][2])

    def _over_slots(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        rows: SlotRows,
        slots: list[int],
        attributes: Mapping[str, Any],
    ) -> torch.Tensor:
        """Compute one call that reads the pool's slots as a stack of experts; `slots` are those of the flattened index."""
        layer = self._layer
        stock = layer.stock_forward_of(self._implementation)

        def run_stock() -> torch.Tensor:
            index = send(slots, hidden.device).view(weights.shape)
            overlay = {**rows.stacks, **attributes, "num_experts": rows.num_slots}
            return stock(layer.adapter.stand_in(layer.experts, overlay), hidden, index, weights)

        if self._implementation == "batched_mm" and len(hidden) == 1 and not attributes:
            return SlotDecode(layer.experts, stock).run(hidden, weights, slots, rows, run_stock)
        return run_stock()

    def _over_stand_ins(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        rows: ExpertRows,
        ids: Sequence[int] | None,
        attributes: Mapping[str, Any],
    ) -> torch.Tensor:
        layer = self._layer
        # grouped_mm sorts the pairs by expert before it reads anything; eager reads expert by expert.
        if self._implementation == "eager":
            ids = None
        elif ids is not None and self._implementation == "grouped_mm":
            ids = sorted(ids)
        call, device = CallRows(rows, ids), hidden.device
        overlay = {name: SlotBank(name, call, shape, dtype, device) for name, shape, dtype in layer.stacked_shapes}
        stand_in = layer.adapter.stand_in(layer.experts, {**overlay, **attributes})
        return layer.stock_forward_of(self._implementation)(stand_in, hidden, index, weights)


def _row_dtype(layer: MoELayer, implementation: str, hidden: torch.Tensor) -> torch.dtype:
    # Autocast reaches batched_mm's products, but not grouped_mm's.
    if implementation == "grouped_mm":
        return layer.stacked_shapes[0][2]
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
