"""Compute the rows of pairs like the stock grouped_mm, but without its sorting and weighting.

For one token, the stock kernel may spend more time on sorting, counting and permuting four pairs than on their
products. A layer that runs in four groups would spend it four times. For many pairs, the stock kernel copies their rows
four times. Here, the pairs are sorted already.

The first rows of each layer are computed by both kernels and compared (`promoe.experts.kernels.proofs`). Where they
differ, the stock kernel is used from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from promoe.experts.kernels.fast import FastProducts
from promoe.experts.kernels.matrices import SECOND, Multiply, activate, factors, first_name, has_norm, product, products
from promoe.experts.kernels.proofs import proof_of
from promoe.experts.pairs import Selection
from promoe.experts.scratch import PartSpace
from promoe.transfer.rows import ExpertRows, Row

logger = logging.getLogger(__name__)

# Memory for the rows of the first product whose activation is computed at once. They stay in a core's cache.
ACTIVATED_BYTES = 2**20


class RowKernel:
    """Computes rows that are sorted by expert with the experts of one layer, in any slot format.

    Args:
        experts: a module made by Transformers' `use_experts_implementation`.
        stock: the kernel whose bits it must have.
        hidden_dtype: dtype of the layer's input.
        row_dtype: dtype of the weights and of the rows.
        few: whether the call has few pairs.
        fast: makes the products, whose bits need not be those of the stock kernel; None: they have to be.
    """

    def __init__(
        self,
        experts: nn.Module,
        stock: Callable[..., torch.Tensor],
        hidden_dtype: torch.dtype,
        row_dtype: torch.dtype,
        few: bool,
        fast: FastProducts | None = None,
    ) -> None:
        self._experts: Any = experts
        self._fast = fast
        self._row_dtype = row_dtype
        self._proof = proof_of((RowKernel, stock, hidden_dtype, row_dtype, few), experts)

    @property
    def proven(self) -> bool | None:
        """Whether it may be used: its bits were those of the stock kernel, or need not be; None: that is not known yet."""
        return self._proof.same if self._fast is None else True

    def prove(self, rows: Sequence[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
        """Compare `rows`, one after the other, with the stock kernel's rows; keep the verdict and return `expected`."""
        if not self._proof.compare(_together(rows), expected) and self.proven is False:
            logger.info(
                "%s: rows are not those of the stock kernel, which is used instead", type(self._experts).__name__
            )
        return expected

    def __call__(self, hidden: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """Return the raw rows `[P, H]` of each expert in `selection`, from its `hidden[P, H]`. For few pairs."""
        return self.finish(self.begin(hidden, selection, rows), selection, rows)

    def begin(self, hidden: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> Sequence[torch.Tensor]:
        """Compute everything before the second product; return its input `[P, I]` for each expert."""
        first = self._each(hidden, first_name(self._experts), selection, rows)
        begun: Sequence[torch.Tensor] = (
            activate(self._experts, _together(first)).to(self._row_dtype).split(selection.sizes)
        )
        return begun

    def finish(self, begun: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """Return the raw rows `[P, H]` of each expert from what `begin` returned."""
        found = self._each(begun, SECOND, selection, rows)
        return list(self._norm(_together(found)).split(selection.sizes)) if has_norm(self._experts) else found

    def _each(self, x: Sequence[torch.Tensor], name: str, selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """Return `x[P, in]` times the matrix of each expert, plus its bias. Joining the results would cost an operation."""
        matrices, multiply = self._factors(name, selection, rows), self._multiply(name)
        found = [multiply(of_expert, matrix, None) for of_expert, matrix in zip(x, matrices, strict=True)]
        self._add_biases(found, name, selection, rows)
        return found

    def part(self, hidden: torch.Tensor, selection: Selection, rows: ExpertRows, space: PartSpace) -> torch.Tensor:
        """Return the raw rows `[P, H]` of the pairs in `selection`, out of `hidden[T, H]`. For many pairs.

        They lie in `space`, and are overwritten at its next use. The activation is computed for some rows at a time, so
        this is for layers whose activations have the same bits that way.
        """
        of_hidden, first, begun = space.of(len(selection))
        assert selection.tokens is not None, "few pairs need no space"
        torch.index_select(hidden, 0, selection.tokens, out=of_hidden)
        self._linear(of_hidden, first_name(self._experts), selection, rows, first)
        at_once = max(1, ACTIVATED_BYTES // (first.shape[1] * first.itemsize))
        for some, target in zip(first.split(at_once), begun.split(at_once), strict=True):
            target.copy_(activate(self._experts, some))
        self._linear(begun, SECOND, selection, rows, of_hidden)
        return self._norm(of_hidden) if has_norm(self._experts) else of_hidden

    def _linear(self, x: torch.Tensor, name: str, selection: Selection, rows: ExpertRows, out: torch.Tensor) -> None:
        """Write `x[P, in]` times the matrix of each pair's expert, plus its bias, into `out[P, out]`."""
        matrices = self._factors(name, selection, rows)
        products(x, matrices, selection.sizes, out.shape[1], out, self._multiply(name))
        self._add_biases(out.split(selection.sizes), name, selection, rows)

    def _multiply(self, name: str) -> Multiply:
        return product if self._fast is None else partial(self._fast.multiply, (id(self._experts), name))

    def _factors(self, name: str, selection: Selection, rows: ExpertRows) -> list[Row]:
        return factors([rows[expert][name] for expert in selection.experts], not self._experts.is_transposed)

    def _add_biases(self, out: Sequence[torch.Tensor], name: str, selection: Selection, rows: ExpertRows) -> None:
        if self._experts.has_bias:
            for expert, of_expert in zip(selection.experts, out, strict=True):
                bias = rows[expert][f"{name}_bias"]
                assert isinstance(bias, torch.Tensor), "only matrices have a format"
                of_expert.add_(bias)

    def _norm(self, raw: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._experts.post_expert_norm(raw)
        return normed


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
