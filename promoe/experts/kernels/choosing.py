"""Choose the kernels that compute a call of a layer's experts. No other code does.

* The **stock kernel** (the model's own) computes everything that no other kernel does. It runs over stand-ins for the
  stacks of experts (`bank`), or, on a device, over the pool's slots (`slot_windows`).
* The **row kernel** (`row_kernel`) computes the rows of groups of experts on the processor, where `grouped_mm` is in
  force.
* **Slot decode** (`slot_decode`) computes one token on a device, where `batched_mm` is in force.

The last two are used only once they have proved to have the stock kernel's bits (`proofs`), or where the user asked for
`fast` products, which need not have them.

On a device, quantised experts are expanded first (`expanding`), and kernels read the copies as if they were slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from promoe.experts.activation import depends_on_shape
from promoe.experts.kernels.bank import CallRows, SlotBank
from promoe.experts.kernels.expanding import expanded
from promoe.experts.kernels.fast import FastProducts
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.kernels.slot_decode import SlotDecode
from promoe.experts.kernels.slot_windows import MAX_GROUPS, has_grouped_kernel
from promoe.experts.moe_layers import MoELayer
from promoe.experts.pairs import FEW_PAIRS
from promoe.transfer.devices import send
from promoe.transfer.rows import ExpertRows, FormattedRows, SlotRows

# `mkldnn_gemm_min_size` of ATen's use_mkldnn_matmul: a batch with more multiplications than this goes to oneDNN.
BMM_ONEDNN_ELEMENTS = 16**3
# Memory for the widest intermediate of a part of a long prompt's rows. Up to twice as much is computed in one call.
# glibc gets blocks of more than 32 MiB from the system and returns them in every layer, page by page, which takes about
# a third of the layer's time.
PART_BYTES = 8 * 2**20

NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


class Kernels:
    """The kernels of one call.

    Attributes:
        row_dtype: dtype of a row before it is weighted.
        depends_on_groups: whether the last bits may depend on which experts run together (see
            `promoe.experts.activation`).
        rows: the kernel that computes the rows of groups; None: the stock kernel does.
        by_rows: whether `rows` is faster than one stock call even if all experts are resident.

    Args:
        layer: the layer whose experts are called.
        implementation: the current experts implementation.
        hidden: `[T, H]`, the experts' input.
        num_pairs: T * K.
        on_device: whether the layer computes on a device.
        fast: makes products with other bits; None: all bits are the stock kernel's.
    """

    __slots__ = (
        "_fast",
        "_implementation",
        "_layer",
        "by_rows",
        "depends_on_groups",
        "part_pairs",
        "row_dtype",
        "rows",
    )

    def __init__(
        self,
        layer: MoELayer,
        implementation: str,
        hidden: torch.Tensor,
        num_pairs: int,
        on_device: bool,
        fast: FastProducts | None = None,
    ) -> None:
        self._layer = layer
        self._fast = fast
        self._implementation = implementation
        self.row_dtype = _row_dtype(layer, implementation, hidden)
        # On a device, a grouped kernel may have other bits than separate products, so the stock kernel computes
        # everything there.
        self.depends_on_groups = (
            not on_device
            and fast is None
            and implementation != "eager"  # eager always computes expert by expert
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
        kernel = RowKernel(layer.experts, stock, hidden.dtype, self.row_dtype, few, self._fast)
        if kernel.proven is not False:
            widest_bytes = max(layer.activation_width, hidden.shape[-1]) * layer.stacked_shapes[0][2].itemsize
            self.part_pairs = max(1, PART_BYTES // widest_bytes)
            always = few or self._fast is not None
            self.rows, self.by_rows = kernel, always or num_pairs > 2 * self.part_pairs

    def begins(self, num_pairs: int) -> bool:
        """Return whether the first tensors of an expert can be used while its last ones are still in flight."""
        return self.rows is not None and bool(self.rows.proven) and num_pairs <= FEW_PAIRS

    @property
    def fewest_rows(self) -> int:
        """The smallest batch size from which torch.bmm always uses oneDNN; 1 if the implementation does not use torch.bmm.

        torch computes a batch of one, and batches of up to `BMM_ONEDNN_ELEMENTS` multiplications, with other code. It
        adds in another order, so the bits differ.
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
        """Compute the experts' output `[T, H]` by the stock kernel over `rows`.

        Args:
            hidden: `[T, H]`, as the module gets it.
            index: `[T, K]`, as the module gets it.
            weights: `[T, K]`, as the module gets it.
            rows: the tensors of every expert in `index`.
            ids: the flattened `index` as a list, if the caller has it.
            attributes: attributes that replace those of the experts module.
        """
        if isinstance(rows, FormattedRows):
            rows = expanded(rows, hidden.device)
        if ids and isinstance(rows, SlotRows) and self._reads_slots(hidden, rows):
            return self._over_slots(hidden, weights, rows, rows.slots_of(ids), attributes)
        layer = self._layer
        # Give the ids in the order in which the kernel reads experts: grouped_mm sorts the pairs by expert first. The
        # eager loop reads one expert at a time, and needs no list.
        if self._implementation == "eager":
            ids = None
        elif ids is not None and self._implementation == "grouped_mm":
            ids = sorted(ids)
        call, device = CallRows(rows, ids), hidden.device
        overlay = {name: SlotBank(name, call, shape, dtype, device) for name, shape, dtype in layer.stacked_shapes}
        stand_in = layer.adapter.stand_in(layer.experts, {**overlay, **attributes})
        return layer.stock_forward_of(self._implementation)(stand_in, hidden, index, weights)

    def _reads_slots(self, hidden: torch.Tensor, rows: SlotRows) -> bool:
        """Return whether the stock kernel can run with a pool's slots as the experts, and slot numbers as the ids.

        The loop (eager) cannot, because it adds in the order of the ids. The other kernels only sort by the ids, so the
        experts' rows come in another order, on which the bits do not depend on a GPU.
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


def _row_dtype(layer: MoELayer, implementation: str, hidden: torch.Tensor) -> torch.dtype:
    # Autocast applies to the products of batched_mm, but not to those of grouped_mm.
    if implementation == "grouped_mm":
        return layer.stacked_shapes[0][2]
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
