"""Runs one MoE layer's experts from slots, bit-identical to the unmodified layer.

When every needed expert is ready, one call of the stock kernel over stand-ins is the whole layer (`run_resident`).
Otherwise groups of experts are computed as they get ready (`run_groups`): each with one row per (token, choice) pair, and the
rows are combined once, in the order in which the stock kernel would have added them. So are few rows, and a long prompt's, in
parts: what its experts compute in between would take more memory at once than an allocator keeps.

All pairs of an expert are in one call and in the stock order, as the bits of a product depend on how many rows it has.

Knows nothing of policies, files or what makes an expert ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from promoe.errors import UnsupportedModelError
from promoe.experts.activation import WholeActivation, depends_on_shape
from promoe.experts.bank import CallRows, SlotBank
from promoe.experts.combine import EagerSum, PlacedRows, WeightedSum
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.kernels.slot_decode import SlotDecode
from promoe.experts.kernels.slot_rows import MAX_GROUPS, has_grouped_kernel
from promoe.experts.moe_layers import MoELayer
from promoe.experts.pairs import FEW_PAIRS, Pairs
from promoe.experts.scratch import PartSpace
from promoe.transfer.devices import send
from promoe.transfer.rows import ExpertRows, FirstRows, SlotRows

# `mkldnn_gemm_min_size` of ATen's use_mkldnn_matmul: a batch with more multiplications than this goes to oneDNN.
BMM_ONEDNN_ELEMENTS = 16**3

# What a part of a long prompt's rows takes at its widest; twice as much is left to one call. A block of more than 32 MiB
# (glibc) comes from the system and goes back to it in every layer, page by page: about a third of such a layer's time.
PART_BYTES = 8 * 2**20

NO_ATTRIBUTES: Mapping[str, Any] = {}


def nothing() -> None:
    """Nothing is to run beside the products."""


Combine = EagerSum | WeightedSum | PlacedRows


def check_no_grad(*inputs: torch.Tensor) -> None:
    """Refuse to run where a backward could follow: slots are overwritten, so the weights would be others by then.

    Raises:
        UnsupportedModelError: gradients are on and one of `inputs` requires them.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise UnsupportedModelError(
            "The experts were called with gradients enabled, but promoe is for inference: the slots that hold the weights "
            "are reused before a backward could read them. Run the model under torch.no_grad() or torch.inference_mode()."
        )


def run_resident(
    layer: MoELayer,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    rows: ExpertRows,
    ids: Sequence[Sequence[int]] | None = None,
    on_host: torch.Tensor | None = None,
    before_product: Callable[[], None] = nothing,
) -> torch.Tensor:
    """The whole layer, for when every needed expert is in `rows`: in one stock call, unless it has few rows or very many.

    Args:
        layer: the layer.
        hidden: `[T, H]`, the experts' input.
        top_k_index: `[T, K]`, int64 expert ids.
        top_k_weights: `[T, K]`, routing weights of any float dtype.
        rows: expert id -> its tensors by parameter name. They are read until this returns, and must not require grad.
        ids: `top_k_index.tolist()`, where the caller has it already.
        on_host: `top_k_index` in host memory, if the layer computes on a device, which is then not asked for it.
        before_product: as in `run_groups`.

    Returns:
        `[T, H]` in the dtype of `hidden`.

    Raises:
        UnsupportedModelError: a gradient is required, or the experts implementation is not supported.
        AssertionError: an expert in `top_k_index` has no rows.
    """
    num_pairs = top_k_index.numel()
    row_kernel = None if on_host is not None else _row_kernel(layer, layer.implementation, hidden, num_pairs)
    if _by_rows(layer, row_kernel, hidden, num_pairs):
        return run_groups(layer, hidden, top_k_index, top_k_weights, (rows,), ids, before_product=before_product)
    check_no_grad(hidden, top_k_weights)
    if ids is None and on_host is not None:
        ids = on_host.tolist()
    flat = None if ids is None else [expert for row in ids for expert in row]
    before_product()
    return _call_stock(layer, layer.implementation, hidden, top_k_index, top_k_weights, rows, flat)


def depends_on_groups(layer: MoELayer, implementation: str, hidden: torch.Tensor, num_pairs: int) -> bool:
    """Whether the last bits of a layer may depend on which experts run together (see `promoe.experts.activation`).

    `eager` computes expert by expert in any case.
    """
    if implementation == "eager":
        return False
    dtype = _row_dtype(layer, implementation, hidden)
    return depends_on_shape(layer.experts, layer.activation_width, dtype, layer.row_sizes, num_pairs)


def can_begin(layer: MoELayer, hidden: torch.Tensor, num_pairs: int) -> bool:
    """Whether `run_groups` can make use of the first tensors of an expert whose last ones are on their way."""
    return _begins(_row_kernel(layer, layer.implementation, hidden, num_pairs), num_pairs)


def _begins(row_kernel: RowKernel | None, num_pairs: int) -> bool:
    return row_kernel is not None and bool(row_kernel.proven) and num_pairs <= FEW_PAIRS


def run_groups(
    layer: MoELayer,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    groups: Iterable[ExpertRows],
    ids: Sequence[Sequence[int]] | None = None,
    on_host: torch.Tensor | None = None,
    before_product: Callable[[], None] = nothing,
) -> torch.Tensor:
    """The whole layer in groups of experts, in whatever order they get ready.

    Args:
        layer: the layer.
        hidden: `[T, H]`, the experts' input.
        top_k_index: `[T, K]`, int64 expert ids.
        top_k_weights: `[T, K]`, routing weights of any float dtype.
        groups: yields groups that together hold every needed expert, as in `run_resident`. An expert is computed with
            the first group that has it; experts that no token chose are left alone. A group's tensors are not read any
            more once the next group is asked for. The iterator is always run to its end.
        ids: `top_k_index.tolist()`, where the caller has it already.
        on_host: `top_k_index` in host memory, if the layer computes on a device, which is then not asked for it.
        before_product: called when products come next, in which this thread does not hold the interpreter: the time for
            another thread to begin. At least once, where there is a product at all; it must be cheap, and not raise.

    Returns:
        `[T, H]` in the dtype of `hidden`. Extra memory is at most the rows `[T * K, H]`, a tile of weighted rows, and what the
        products take in between: for a part (`PART_BYTES`) or one expert, if that is more. Where rows have to go through the
        stock kernel, for the pairs of one group; where activations depend on groups, for them of all pairs.

    Raises:
        UnsupportedModelError: a gradient is required, or the experts implementation is not supported.
        AssertionError: the groups left a needed expert out.
    """
    check_no_grad(hidden, top_k_weights)
    implementation = layer.implementation
    by_choice = implementation == "eager"
    if on_host is None:
        pairs = Pairs(top_k_index, layer.num_ids, by_choice, ids)
        depends = depends_on_groups(layer, implementation, hidden, pairs.count)
        row_kernel = None if depends else _row_kernel(layer, implementation, hidden, pairs.count, before_product)
    else:
        pairs = Pairs(on_host, layer.num_ids, by_choice, ids, hidden.device)
        # The bits of a device's grouped kernel need not be those of products one by one.
        depends, row_kernel = False, None
    by_rows = _by_rows(layer, row_kernel, hidden, pairs.count)
    make_combine = partial(_combine_for, layer, implementation, row_kernel, depends, hidden, top_k_weights, pairs)
    combine: Combine | None = None
    whole: torch.Tensor | None = None
    if layer.num_ids > layer.num_experts:  # the ids without weights are ready from the start
        groups = chain(({idle: {} for idle in range(layer.num_experts, layer.num_ids)},), groups)
    for rows in groups:
        if isinstance(rows, FirstRows):
            if _begins(row_kernel, pairs.count):
                combine = combine or make_combine()
                assert isinstance(combine, WeightedSum)
                for expert in pairs.missing:
                    if expert in rows:
                        combine.begin(expert, rows)
            continue
        experts = pairs.take(rows)
        at_once = len(experts) == len(pairs.experts) and not by_rows
        if row_kernel is None or at_once:
            before_product()
        if at_once:
            flat: list[int] | None = None if on_host is None else on_host.reshape(-1).tolist()
            whole = _call_stock(layer, implementation, hidden, top_k_index, top_k_weights, rows, flat)
        elif experts:
            combine = combine or make_combine()
            for part in [experts] if row_kernel is None else pairs.parts(experts, _part_pairs(layer, hidden)):
                combine.add(pairs.select(part), rows)
    assert not pairs.missing, f"{layer.name}: no group had experts {pairs.missing}"
    if whole is not None:
        return whole
    # No pairs at all (no tokens) and no group: the stock kernel knows what to return.
    return (
        combine.result()
        if combine
        else _call_stock(layer, implementation, hidden, top_k_index, top_k_weights, {}, None)
    )


def _combine_for(
    layer: MoELayer,
    implementation: str,
    row_kernel: RowKernel | None,
    depends_on_groups: bool,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    pairs: Pairs,
) -> Combine:
    kernel = partial(_call_stock, layer, implementation)
    if not layer.adapter.sums_rows:
        return PlacedRows(kernel, hidden, weights, pairs)
    if implementation == "eager":
        return EagerSum(kernel, layer.eager_forward, hidden, weights, pairs)
    row_dtype = _row_dtype(layer, implementation, hidden)
    fewest_rows = _fewest_rows(layer) if implementation == "batched_mm" else 1
    by_expert = implementation == "grouped_mm"
    activation = WholeActivation(layer.experts, pairs, by_expert) if depends_on_groups else None
    space = None
    if row_kernel is not None and pairs.count > FEW_PAIRS:
        num_rows = min(pairs.count, max(_part_pairs(layer, hidden), pairs.most_of_an_expert()))
        space = PartSpace(num_rows, hidden.shape[-1], layer.activation_width, layer.second_width, row_dtype)
    return WeightedSum(kernel, row_kernel, activation, space, row_dtype, fewest_rows, hidden, weights, pairs)


def _fewest_rows(layer: MoELayer) -> int:
    """From how many pairs on torch.bmm takes the path that it takes for any larger number of them.

    A batch of one is a product of two matrices, and oneDNN takes over from `BMM_ONEDNN_ELEMENTS` multiplications on: two
    ways of adding, hence different bits.
    """
    smallest = min(math.prod(shape[1:]) for _, shape, _ in layer.stacked_shapes if len(shape) > 2)
    return max(2, BMM_ONEDNN_ELEMENTS // smallest + 1)


def _row_kernel(
    layer: MoELayer,
    implementation: str,
    hidden: torch.Tensor,
    num_pairs: int,
    before_product: Callable[[], None] = nothing,
) -> RowKernel | None:
    """What to compute the rows of groups by, unless it has been found to differ from the stock kernel."""
    if implementation != "grouped_mm" or not layer.adapter.sums_rows or not num_pairs:
        return None
    stock, row_dtype = layer.stock_forward_of(implementation), _row_dtype(layer, implementation, hidden)
    kernel = RowKernel(layer.experts, stock, hidden.dtype, row_dtype, num_pairs <= FEW_PAIRS, before_product)
    return None if kernel.proven is False else kernel


def _by_rows(layer: MoELayer, row_kernel: RowKernel | None, hidden: torch.Tensor, num_pairs: int) -> bool:
    """Whether one stock call is not the best way to compute a layer whose experts are all there."""
    return row_kernel is not None and (num_pairs <= FEW_PAIRS or num_pairs > 2 * _part_pairs(layer, hidden))


def _part_pairs(layer: MoELayer, hidden: torch.Tensor) -> int:
    """Pairs of a part: `PART_BYTES` at the widest of what is computed of them."""
    widest_bytes = max(layer.activation_width, hidden.shape[-1]) * layer.stacked_shapes[0][2].itemsize
    return max(1, PART_BYTES // widest_bytes)


def _row_dtype(layer: MoELayer, implementation: str, hidden: torch.Tensor) -> torch.dtype:
    """The dtype of a row before it is weighted: autocast reaches batched_mm's products, but not grouped_mm's."""
    if implementation == "grouped_mm":
        return layer.stacked_shapes[0][2]
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _reads_slots(layer: MoELayer, implementation: str, hidden: torch.Tensor, rows: SlotRows) -> bool:
    """Whether the stock kernel can take a pool's slots for the experts, and their numbers for the ids.

    Its loop (eager) adds in the order of the ids. The other kernels sort by them: rows of an expert then come in another order,
    on which their bits do not depend on a GPU.
    """
    if implementation == "eager" or not layer.adapter.sums_rows or layer.num_ids > layer.num_experts:
        return False
    if len(hidden) > 1 and not hidden.is_cuda:
        return False
    if implementation == "batched_mm":
        return True
    return rows.num_slots <= MAX_GROUPS and has_grouped_kernel(hidden.device, layer.stacked_shapes[0][2])


def _call_over_slots(
    layer: MoELayer,
    implementation: str,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    rows: SlotRows,
    slots: list[int],
    attributes: Mapping[str, Any],
) -> torch.Tensor:
    """One call that reads the pool's slots as a stack of experts; `slots` are those of the flattened index."""
    stock = layer.stock_forward_of(implementation)

    def run_stock() -> torch.Tensor:
        index = send(slots, hidden.device).view(weights.shape)
        stand_in = layer.adapter.stand_in(layer.experts, {**rows.stacks, **attributes, "num_experts": rows.num_slots})
        return stock(stand_in, hidden, index, weights)

    if implementation == "batched_mm" and len(hidden) == 1 and not attributes:
        return SlotDecode(layer.experts, stock).run(hidden, weights, slots, rows, run_stock)
    return run_stock()


def _call_stock(
    layer: MoELayer,
    implementation: str,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    ids: Sequence[int] | None,
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
) -> torch.Tensor:
    """One stock call over `rows`; `ids`, if known, is the flattened `index`; `attributes` hide the module's own."""
    if ids and isinstance(rows, SlotRows) and _reads_slots(layer, implementation, hidden, rows):
        return _call_over_slots(layer, implementation, hidden, weights, rows, rows.slots_of(ids), attributes)
    # grouped_mm sorts the pairs by expert before it reads anything; eager reads expert by expert.
    if implementation == "eager":
        ids = None
    elif ids is not None and implementation == "grouped_mm":
        ids = sorted(ids)
    call, device = CallRows(rows, ids), hidden.device
    overlay = {name: SlotBank(name, call, shape, dtype, device) for name, shape, dtype in layer.stacked_shapes}
    stand_in = layer.adapter.stand_in(layer.experts, {**overlay, **attributes})
    return layer.stock_forward_of(implementation)(stand_in, hidden, index, weights)
