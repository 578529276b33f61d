"""Combine rows that were computed in groups of experts, in the order in which the stock kernel adds them.

The results of the groups cannot simply be added up: each partial sum would be rounded, and the order of the additions
would be another one.
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

# Memory for the weighted rows of a long prompt, which are computed tile by tile.
_TILE_BYTES = 16 * 2**20


class WeightedSum:
    """Combines rows like batched_mm and grouped_mm: keeps each pair's raw row, then weights and adds each token's rows.

    Args:
        kernels: the call's kernels. The row kernel computes the rows, once it has proved to give the same bits.
        activation: computes activations with the stock kernel's bits; None: the module's own activation does.
        space: memory in which the row kernel computes many pairs; None if there are few.
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
        # The stock kernel gets at least this many rows, but no more than the whole call has. Pairs are repeated for
        # this.
        self._fewest_rows = min(kernels.fewest_rows, pairs.count)
        self._weights = weights
        self._pairs = pairs
        self._dtype = hidden.dtype
        # The kernel would cast its input to this dtype, and its result back. If the input is cast beforehand, the
        # kernel returns the rows in this dtype.
        self._hidden = hidden.to(kernels.row_dtype)
        self._begun: dict[int, torch.Tensor] = {}  # expert -> the input of its second product
        # Rows by position: a list of rows if there are few, otherwise one tensor.
        self._few: list[torch.Tensor] = []
        self._rows: torch.Tensor | None = None

    def begin(self, expert: int, rows: ExpertRows) -> None:
        """Compute an expert up to its second product, from its first tensors alone."""
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
        """Return the rows in order, in one tensor or several. Many rows are always in one."""
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
        """Return the inputs of these experts' second products, and compute those that were not begun yet."""
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
        # The kernel sorts the pairs by expert. They are sorted already, and only a stable sort keeps their order.
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
    """Makes every sort in its context stable. With 17 elements or more, torch.sort may reorder equal keys."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sort, torch.argsort, torch.Tensor.sort, torch.Tensor.argsort):
            kwargs = {**kwargs, "stable": True}
        return func(*args, **kwargs)


class PlacedRows:
    """Puts each result row into the place of its input row, for layers in which every row has one expert.

    Args:
        kernels: the call's kernels.
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
    """Combines rows like eager: adds them expert by expert in ascending id, each sum rounded to the accumulator's dtype.

    An expert's rows are added as soon as those of all smaller ids have been, so that no more rows than necessary are
    kept.

    Args:
        kernels: the call's kernels.
        family: the eager loop's function, which identifies its code.
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
            # With one choice per row, the loop's sum is 0 + row. So it returns the weighted and rounded rows that it
            # adds.
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
# in the dtype of `hidden`. The others (nemotron_h in the dtype of the weights, inkling2 and openai_privacy_filter in
# fp32) round their sum at the end, so their rows have to be recorded when they are added.
_ACCUMULATORS: dict[tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype], torch.dtype] = {}


class _RecordIndexAdd(TorchFunctionMode):
    """Records the rows that an eager loop adds for each expert, in ascending id, and does not add them."""

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
        """Return the accumulator's dtype and the rows of each expert. `sizes` are the expected numbers of rows.

        Raises:
            UnsupportedModelError: the loop added other numbers of rows.
        """
        found = [len(source) for source in self._sources]
        if self._dtype is None or found != sizes:
            raise UnsupportedModelError(
                f"This model's eager experts do not add one block of rows per expert. Found blocks of {found} rows, expected "
                f"{sizes}. Call model.set_experts_implementation('grouped_mm'), or give promoe a cache that holds all experts "
                "of a layer."
            )
        return self._dtype, self._sources
