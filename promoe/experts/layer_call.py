"""One call of an MoE layer's experts, computed from slots, with the same bits as the unmodified layer.

If every needed expert is ready, one call of the stock kernel over stand-ins computes the whole layer (`run_resident`).
Otherwise groups of experts are computed as they get ready (`run_groups`), with one row per (token, choice) pair. So are
quantised experts on a device if there are too many to expand at once (`promoe.experts.kernels.expanding`). The
rows are combined once, in the order in which the stock kernel adds them. Few rows are always computed this way. The
rows of a long prompt are, too, in parts: the intermediates of all its experts at once would take more memory than an
allocator keeps.

All pairs of an expert are in one product and in the stock order, because the bits of a product depend on its number of
rows.

This module knows nothing of policies or files, or of what makes an expert ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from promoe.errors import UnsupportedModelError
from promoe.experts.activation import WholeActivation
from promoe.experts.combine import EagerSum, PlacedRows, WeightedSum
from promoe.experts.kernels.choosing import Kernels
from promoe.experts.kernels.expanding import most_expanded, split
from promoe.experts.kernels.fast import FastProducts
from promoe.experts.moe_layers import MoELayer
from promoe.experts.pairs import FEW_PAIRS, Pairs
from promoe.experts.scratch import PartSpace
from promoe.transfer.rows import ExpertRows, FirstRows, FormattedRows

Combine = EagerSum | WeightedSum | PlacedRows


def check_no_grad(*inputs: torch.Tensor) -> None:
    """Check that no backward pass can follow. It would read other weights, because slots are overwritten.

    Raises:
        UnsupportedModelError: gradients are enabled and one of `inputs` requires them.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise UnsupportedModelError(
            "The experts were called with gradients enabled, but promoe supports inference only: the slots that hold the "
            "weights are reused before a backward pass could read them. Run the model under torch.no_grad() or "
            "torch.inference_mode()."
        )


class LayerCall:
    """One call of a layer's experts, and the kernels that compute it.

    Args:
        layer: the layer.
        hidden: `[T, H]`, the experts' input.
        index: `[T, K]`, int64 expert ids.
        weights: `[T, K]`, routing weights of any float dtype.
        ids: `index.tolist()`, if the caller has it already.
        on_host: `index` in host memory, if the layer computes on a device; so it need not be copied from there.
        fast: makes products with other bits than the unmodified layer's; None: the bits are the same.

    Raises:
        UnsupportedModelError: a gradient is required, or the experts implementation is not supported.
    """

    def __init__(
        self,
        layer: MoELayer,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        ids: Sequence[Sequence[int]] | None = None,
        on_host: torch.Tensor | None = None,
        fast: FastProducts | None = None,
    ) -> None:
        check_no_grad(hidden, weights)
        self._layer = layer
        self._hidden = hidden
        self._index = index
        self._weights = weights
        self._ids = ids
        self._on_host = on_host
        self._implementation = layer.implementation
        self._num_pairs = index.numel()
        self._kernels = Kernels(layer, self._implementation, hidden, self._num_pairs, on_host is not None, fast)
        # Made now rather than when the call runs, because then products should start at once.
        self._pairs = self._all_pairs() if self._kernels.by_rows else None

    @property
    def depends_on_groups(self) -> bool:
        """Whether the last bits may depend on which experts run together."""
        return self._kernels.depends_on_groups

    @property
    def can_begin(self) -> bool:
        """Whether `run_groups` can use the first tensors of an expert whose last tensors are still in flight."""
        return self._kernels.begins(self._num_pairs)

    def run_resident(self, rows: ExpertRows) -> torch.Tensor:
        """Compute the whole layer when every needed expert is there.

        Args:
            rows: expert id -> its tensors by parameter name. They are read until this returns, and must not require
                grad.

        Returns:
            `[T, H]` in the dtype of `hidden`.

        Raises:
            AssertionError: an expert in `index` has no rows.
        """
        in_groups = self._kernels.by_rows or (isinstance(rows, FormattedRows) and len(rows) > self._most_expanded)
        return self.run_groups((rows,)) if in_groups else self._whole(rows)

    @property
    def _most_expanded(self) -> int:
        return most_expanded(self._layer.layout.payload_bytes, self._index.shape[-1])

    def _whole(self, rows: ExpertRows) -> torch.Tensor:
        """Compute all experts in one stock call."""
        ids = self._ids if self._ids is not None or self._on_host is None else self._on_host.tolist()
        flat = None if ids is None else [expert for row in ids for expert in row]
        return self._kernels.stock(self._hidden, self._index, self._weights, rows, flat)

    def run_groups(self, groups: Iterable[ExpertRows]) -> torch.Tensor:
        """Compute the whole layer in groups of experts, in whatever order they get ready.

        Args:
            groups: yields groups that together hold every needed expert, as in `run_resident`. An expert is computed
                with the first group that has it; experts that no token chose are ignored. A group's tensors are not
                read any more once the next group is asked for. The iterator is always run to its end.

        Returns:
            `[T, H]` in the dtype of `hidden`. Extra memory is at most the rows `[T * K, H]`, a tile of weighted rows,
            and the intermediates of a part (`PART_BYTES`) or of one expert, if that is more. Where rows have to go
            through the stock kernel, it is the intermediates of one group; where activations depend on groups, of all
            pairs.

        Raises:
            AssertionError: the groups left a needed expert out.
        """
        layer, kernels = self._layer, self._kernels
        pairs = self._pairs or self._all_pairs()
        begins = kernels.begins(pairs.count)
        combine: Combine | None = None
        whole: torch.Tensor | None = None
        if layer.num_ids > layer.num_experts:  # ids that need no weights are ready from the start
            groups = chain(({idle: {} for idle in range(layer.num_experts, layer.num_ids)},), groups)
        if self._on_host is not None:
            groups = split(groups, self._most_expanded)
        for rows in groups:
            if isinstance(rows, FirstRows):
                if begins:
                    combine = combine or self._combine(pairs)
                    assert isinstance(combine, WeightedSum)
                    for expert in pairs.missing:
                        if expert in rows:
                            combine.begin(expert, rows)
                continue
            experts = pairs.take(rows)
            if len(experts) == len(pairs.experts) and not kernels.by_rows:
                whole = self._whole(rows)
            elif experts:
                combine = combine or self._combine(pairs)
                for part in [experts] if kernels.rows is None else pairs.parts(experts, kernels.part_pairs):
                    combine.add(pairs.select(part), rows)
        assert not pairs.missing, f"{layer.name}: no group had experts {pairs.missing}"
        if whole is not None:
            return whole
        # Without tokens there are no pairs and no groups. The stock kernel knows what to return then.
        return combine.result() if combine else self._whole({})

    def _all_pairs(self) -> Pairs:
        by_choice = self._implementation == "eager"
        on_host, device = (self._index, None) if self._on_host is None else (self._on_host, self._hidden.device)
        return Pairs(on_host, self._layer.num_ids, by_choice, self._ids, device)

    def _combine(self, pairs: Pairs) -> Combine:
        layer, kernels, hidden, weights = self._layer, self._kernels, self._hidden, self._weights
        if not layer.adapter.sums_rows:
            return PlacedRows(kernels, hidden, weights, pairs)
        if self._implementation == "eager":
            return EagerSum(kernels, layer.eager_forward, hidden, weights, pairs)
        by_expert = self._implementation == "grouped_mm"
        activation = WholeActivation(layer.experts, pairs, by_expert) if kernels.depends_on_groups else None
        space = None
        if kernels.rows is not None and pairs.count > FEW_PAIRS:
            num_rows = min(pairs.count, max(kernels.part_pairs, pairs.most_of_an_expert()))
            space = PartSpace(num_rows, hidden.shape[-1], layer.activation_width, layer.second_width, kernels.row_dtype)
        return WeightedSum(kernels, activation, space, hidden, weights, pairs)
