"""Combines rows that were computed in groups of experts, in the order in which the stock kernel would have added them.

Why not add up the groups' own results: each partial sum would be rounded, and the additions would come in another
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from promoe.errors import UnsupportedModelError
from promoe.experts.activation import WholeActivation
from promoe.experts.kernels.choosing import Kernels
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.pairs import Pairs, Selection
from promoe.experts.scratch import PartSpace
from promoe.transfer.rows import ExpertRows

# Weighted rows exist for this much of a long prompt at a time.
_TILE_BYTES = 16 * 2**20


class WeightedSum:
    """Combines like batched_mm and grouped_mm: raw rows per pair, then weighted and summed over a token's choices at once.

    Args:
        kernels: of the call. The row kernel computes the rows, once it has proved to give the same bits.
        activation: computes the stock kernel's activations; None: the module's own does.
        space: memory for what the row kernel computes of many pairs; None where they are few.
        hidden: `[T, H]`.
        weights: `[T, K]`.
        pairs: the call's pairs.
    """

    def __init__(
        self,
        kernels: Kernels,
        activation: WholeActivation | None,
        space: PartSpace | None,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        pairs: Pairs,
    ) -> None:
        self._kernels = kernels
        self._activation = activation
        self._space = space
        # The stock kernel is given at least so many rows, as far as the whole call has them; pairs are repeated.
        self._fewest_rows = min(kernels.fewest_rows, pairs.count)
        self._weights = weights
        self._pairs = pairs
        self._dtype = hidden.dtype
        # The kernel would cast its input to this dtype and its result back. If the input is cast first, its rows come
        # out as they are.
        self._hidden = hidden.to(kernels.row_dtype)
        self._begun: dict[int, torch.Tensor] = {}  # expert -> its rows as far as the first tensors go
        # Rows by position: one by one if there are few, else together.
        self._few: list[torch.Tensor] = []
        self._rows: torch.Tensor | None = None

    def begin(self, expert: int, rows: ExpertRows) -> None:
        """Compute an expert as far as that goes with its first tensors alone."""
        assert self._kernels.rows is not None
        self._begun[expert] = self._begin(self._kernels.rows, [expert], rows)[0]

    def _begin(self, kernel: RowKernel, experts: list[int], rows: ExpertRows) -> Sequence[torch.Tensor]:
        selection = self._pairs.select(experts)
        return kernel.begin(selection.gather_each(self._hidden), selection, rows)

    def add(self, selection: Selection, rows: ExpertRows) -> None:
        """Compute the raw rows of one group."""
        found = self._raw_rows(selection, rows)
        if isinstance(selection.positions, list):
            self._few = self._few or [found[0]] * self._pairs.count
            each = (row for some in found for row in (some.split(1) if len(some) > 1 else (some,)))
            for position, row in zip(selection.positions, each, strict=True):
                self._few[position] = row
            return
        (out,) = found
        if self._rows is None:
            self._rows = out.new_empty((self._pairs.count, out.shape[-1]))
        self._rows.index_copy_(0, selection.position_tensor, out)

    def _raw_rows(self, selection: Selection, rows: ExpertRows) -> Sequence[torch.Tensor]:
        """Return the rows one after the other; many in one tensor."""
        kernel = self._kernels.rows
        if kernel is None or kernel.proven is False:
            return (self._stock_rows(selection, rows),)
        found: Sequence[torch.Tensor]
        if self._space is not None:
            found = (kernel.part(self._hidden, selection, rows, self._space),)
        elif self._begun:
            found = kernel.finish(self._begun_of(kernel, selection.experts, rows), selection, rows)
        else:
            found = kernel(selection.gather_each(self._hidden), selection, rows)
        return found if kernel.proven else (kernel.prove(found, self._stock_rows(selection, rows)),)

    def _begun_of(self, kernel: RowKernel, experts: list[int], rows: ExpertRows) -> list[torch.Tensor]:
        """Return what was begun of these experts, and begin those that were not."""
        if others := [expert for expert in experts if expert not in self._begun]:
            self._begun.update(zip(others, self._begin(kernel, others, rows), strict=True))
        return [self._begun.pop(expert) for expert in experts]

    def _stock_rows(self, selection: Selection, rows: ExpertRows) -> torch.Tensor:
        hidden, index, ids = selection.gather(self._hidden), selection.index, selection.ids
        count = len(index)
        if (lacking := self._fewest_rows - count) > 0:
            hidden = torch.cat([hidden, hidden[-1:].expand(lacking, -1)])
            index = torch.cat([index, index[-1:].expand(lacking, 1)])
            ids = None if ids is None else [*ids, *(ids[-1:] * lacking)]
        ones = torch.ones((len(index), 1), dtype=self._kernels.row_dtype, device=hidden.device)
        attributes = {} if self._activation is None else self._activation.attributes(selection)
        # The kernel sorts the pairs by expert, which they are already; only a stable sort leaves them as they are.
        with _StableSort() if count > len(selection.experts) else nullcontext():
            return self._kernels.stock(hidden, index, ones, rows, ids, attributes)[:count]

    def result(self) -> torch.Tensor:
        """Return the layer's output `[T, H]`."""
        if self._space is not None:
            self._space.release()
        tokens, choices = self._weights.shape
        together = torch.cat(self._few) if self._few else self._rows
        assert together is not None, "no group was added"
        rows = together.view(tokens, choices, -1)
        weights = self._weights.unsqueeze(-1)
        tile = max(1, _TILE_BYTES // (choices * rows.stride(1) * rows.element_size()))
        if tokens <= tile:
            return (rows * weights).sum(dim=1).to(self._dtype)
        out = torch.empty((tokens, rows.shape[-1]), dtype=self._dtype, device=rows.device)
        for start in range(0, tokens, tile):
            end = start + tile
            out[start:end] = (rows[start:end] * weights[start:end]).sum(dim=1)
        return out


class _StableSort(TorchFunctionMode):
    """Makes every sort inside it stable: torch.sort moves equal keys, from 17 elements on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sort, torch.argsort, torch.Tensor.sort, torch.Tensor.argsort):
            kwargs = {**kwargs, "stable": True}
        return func(*args, **kwargs)


class PlacedRows:
    """Combines nothing: every row has one expert, and its result takes its place.

    Args:
        kernels: of the call.
        hidden: `[P, H]`.
        weights: `[P, 1]`.
        pairs: the call's pairs.
    """

    def __init__(self, kernels: Kernels, hidden: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> None:
        self._kernels = kernels
        self._hidden = hidden
        self._weights = weights
        self._count = pairs.count
        self._rows: torch.Tensor | None = None

    def add(self, selection: Selection, rows: ExpertRows) -> None:
        """Compute the rows of one group."""
        positions = selection.position_tensor
        out = self._kernels.stock(self._hidden[positions], selection.index, self._weights[positions], rows, None)
        if self._rows is None:
            self._rows = out.new_empty((self._count, out.shape[-1]))
        self._rows.index_copy_(0, positions, out)

    def result(self) -> torch.Tensor:
        """Return the layer's output `[P, H']`."""
        assert self._rows is not None, "no group was added"
        return self._rows


class EagerSum:
    """Combines like eager: expert by expert in ascending id, each addition rounded to the accumulator's dtype.

    An expert's rows are added as soon as those of all smaller ids have been, so no more rows are kept than necessary.

    Args:
        kernels: of the call.
        family: identifies the eager loop's code.
        hidden: `[T, H]`.
        weights: `[T, K]`.
        pairs: the call's pairs.
    """

    def __init__(
        self,
        kernels: Kernels,
        family: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        weights: torch.Tensor,
        pairs: Pairs,
    ) -> None:
        self._kernels = kernels
        self._hidden = hidden
        self._flat_weights = weights.reshape(-1)
        self._signature = (family, hidden.dtype, weights.dtype)
        self._order = pairs.experts
        self._added = 0
        self._waiting: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._sum: torch.Tensor | None = None

    def add(self, selection: Selection, rows: ExpertRows) -> None:
        """Compute the weighted rows of one group, and add those whose turn it is."""
        hidden = selection.gather(self._hidden)
        weights = self._flat_weights[selection.position_tensor].unsqueeze(1)
        accumulator = _ACCUMULATORS.get(self._signature)
        if accumulator == self._hidden.dtype:
            # One choice per row, so the loop's sum is 0 + row: the rows as it adds them, weighted and rounded.
            sources = self._kernels.stock(hidden, selection.index, weights, rows, None).split(selection.sizes)
        else:
            with _RecordIndexAdd() as recorded:
                self._kernels.stock(hidden, selection.index, weights, rows, None)
            accumulator, sources = recorded.additions(selection.sizes)
            _ACCUMULATORS[self._signature] = accumulator
        if self._sum is None:
            self._sum = torch.zeros_like(self._hidden, dtype=accumulator)
        self._waiting.update(
            zip(selection.experts, zip(selection.tokens_by_expert(), sources, strict=True), strict=True)
        )
        self._add_those_whose_turn_it_is(self._sum)

    def _add_those_whose_turn_it_is(self, total: torch.Tensor) -> None:
        while self._added < len(self._order) and self._order[self._added] in self._waiting:
            tokens, source = self._waiting.pop(self._order[self._added])
            if tokens is None:
                total.add_(source)
            else:
                total.index_add_(0, tokens, source)
            self._added += 1

    def result(self) -> torch.Tensor:
        """Return the layer's output `[T, H]`."""
        assert self._sum is not None, "no group was added"
        assert self._added == len(self._order), f"{self._added} of {len(self._order)} experts were added"
        return self._sum.to(self._hidden.dtype)


# (eager loop, dtype of hidden, dtype of weights) -> dtype in which the loop accumulates. Nearly all families accumulate
# in the dtype of hidden; the others (nemotron_h: of the weights, inkling2 and openai_privacy_filter: fp32) round at the
# end, so that their rows can only be seen on the way into the sum.
_ACCUMULATORS: dict[tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype], torch.dtype] = {}


class _RecordIndexAdd(TorchFunctionMode):
    """Keeps what an eager loop would add per expert, in ascending id, instead of adding it."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[torch.Tensor] = []
        self._dtype: torch.dtype | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.index_add_:
            total, _, _, source = args
            self._dtype = total.dtype
            self._sources.append(source)
            return total
        return func(*args, **(kwargs or {}))

    def additions(self, sizes: list[int]) -> tuple[torch.dtype, list[torch.Tensor]]:
        """Return the accumulator's dtype and the rows added per expert; `sizes` are the numbers of rows that are expected."""
        found = [len(source) for source in self._sources]
        if self._dtype is None or found != sizes:
            raise UnsupportedModelError(
                f"This model's eager experts do not add one block of rows per expert: {found} where {sizes} is expected. Call "
                "model.set_experts_implementation('grouped_mm'), or give promoe a cache that holds all experts of a layer."
            )
        return self._dtype, self._sources
