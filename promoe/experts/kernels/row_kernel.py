"""Rows of pairs, by what the stock grouped_mm does between its sorting and its weighting, and by no more than that.

For one token the stock kernel spends more time on sorting, counting and permuting four pairs than some experts' products
take, and a layer that runs in four groups would pay that four times; for many, it copies their rows four times more. Here the
pairs are sorted already.

Whether that gives the bits of the stock kernel is not taken for granted: the first rows of each layer are computed both
ways and compared (`RowKernel.prove`). Where they differ, the stock kernel is used for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from promoe.experts.bank import factors, product, products
from promoe.experts.pairs import Selection
from promoe.experts.scratch import PartSpace
from promoe.transfer.rows import ExpertRows, Row

# How the names of the tensors begin that only the second product reads.
SECOND = "down_proj"

logger = logging.getLogger(__name__)

Verdicts = dict[tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype, bool], bool]
# Of each experts module: (stock function, dtype of hidden, of the weights, whether pairs were few) -> were the bits the same.
_VERDICTS: WeakKeyDictionary[nn.Module, Verdicts] = WeakKeyDictionary()

# Rows of the first product whose activation is computed at once: what it takes in between stays in a core's cache.
ACTIVATED_BYTES = 2**20


class RowKernel:
    """The experts of one layer, on rows that are sorted by expert.

    Args:
        experts: a module with the attributes that `use_experts_implementation` of transformers gives it.
        stock: the kernel that it has to agree with.
        hidden_dtype: of the layer's input.
        row_dtype: of the weights, and of the rows.
        few: whether the call has few pairs.
        before_product: called right before each product.
    """

    def __init__(
        self,
        experts: nn.Module,
        stock: Callable[..., torch.Tensor],
        hidden_dtype: torch.dtype,
        row_dtype: torch.dtype,
        few: bool,
        before_product: Callable[[], None],
    ) -> None:
        self._experts: Any = experts
        self._before_product = before_product
        self._row_dtype = row_dtype
        self._verdicts = _VERDICTS.setdefault(experts, {})
        self._key = (stock, hidden_dtype, row_dtype, few)

    @property
    def proven(self) -> bool | None:
        """Whether its bits were those of the stock kernel; None before the first comparison."""
        return self._verdicts.get(self._key)

    def prove(self, rows: Sequence[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
        """Keep the verdict on `rows`, one after the other, against the stock kernel's `expected`, and return the latter.

        Rows that differ and are not all numbers (of padding, say) say nothing: what is no number differs from itself.
        """
        found = _together(rows)
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        if not same and bool(expected.isnan().any()):
            return expected
        self._verdicts[self._key] = same and self.proven is not False  # what differed once is never trusted again
        if not same:
            logger.info(
                "%s: rows are not those of the stock kernel, which is used instead", type(self._experts).__name__
            )
        return expected

    def __call__(self, hidden: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """The raw rows of few pairs, of each expert in `selection` `[P, H]`, from its `hidden[P, H]`."""
        return self.finish(self.begin(hidden, selection, rows), selection, rows)

    def begin(self, hidden: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> Sequence[torch.Tensor]:
        """As far as that goes without the tensors of the second product: of each expert `[P, I]`."""
        first = self._each(hidden, self._first_name, selection, rows)
        begun: Sequence[torch.Tensor] = self._activate(_together(first)).to(self._row_dtype).split(selection.sizes)
        return begun

    def finish(self, begun: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """What `begin` left to do."""
        found = self._each(begun, SECOND, selection, rows)
        return list(self._norm(_together(found)).split(selection.sizes)) if self._has_norm else found

    def _each(self, x: Sequence[torch.Tensor], name: str, selection: Selection, rows: ExpertRows) -> list[torch.Tensor]:
        """Of each expert: `x[P, in]` times its matrix, plus its bias. What is put together costs an operation each time."""
        matrices = self._factors(name, selection, rows)
        self._before_product()
        found = [product(of_expert, matrix) for of_expert, matrix in zip(x, matrices, strict=True)]
        self._add_biases(found, name, selection, rows)
        return found

    def part(self, hidden: torch.Tensor, selection: Selection, rows: ExpertRows, space: PartSpace) -> torch.Tensor:
        """The raw rows `[P, H]` of many pairs, those in `selection`, out of `hidden[T, H]`; in `space`, gone at its next use.

        The activation is computed for some rows at a time, which is for layers where that does not show in its bits.
        """
        of_hidden, first, begun = space.of(len(selection))
        assert selection.tokens is not None, "few pairs need no space"
        torch.index_select(hidden, 0, selection.tokens, out=of_hidden)
        self._linear(of_hidden, self._first_name, selection, rows, first)
        at_once = max(1, ACTIVATED_BYTES // (first.shape[1] * first.itemsize))
        for some, target in zip(first.split(at_once), begun.split(at_once), strict=True):
            target.copy_(self._activate(some))
        self._linear(begun, SECOND, selection, rows, of_hidden)
        return self._norm(of_hidden) if self._has_norm else of_hidden

    def _linear(self, x: torch.Tensor, name: str, selection: Selection, rows: ExpertRows, out: torch.Tensor) -> None:
        """`x[P, in]` times each pair's expert's matrix, plus its bias, in `out[P, out]`."""
        matrices = self._factors(name, selection, rows)
        self._before_product()
        products(x, matrices, selection.sizes, out.shape[1], out)
        self._add_biases(out.split(selection.sizes), name, selection, rows)

    def _factors(self, name: str, selection: Selection, rows: ExpertRows) -> list[Row]:
        return factors([rows[expert][name] for expert in selection.experts], not self._experts.is_transposed)

    def _add_biases(self, out: Sequence[torch.Tensor], name: str, selection: Selection, rows: ExpertRows) -> None:
        if self._experts.has_bias:
            for expert, of_expert in zip(selection.experts, out, strict=True):
                bias = rows[expert][f"{name}_bias"]
                assert isinstance(bias, torch.Tensor), "only matrices are packed"
                of_expert.add_(bias)

    @property
    def _first_name(self) -> str:
        return "gate_up_proj" if self._experts.has_gate else "up_proj"

    def _activate(self, first: torch.Tensor) -> torch.Tensor:
        experts = self._experts
        activated: torch.Tensor = experts._apply_gate(first) if experts.has_gate else experts.act_fn(first)
        return activated

    @property
    def _has_norm(self) -> bool:
        return getattr(self._experts, "has_post_expert_norm", False)  # Transformers has it from 5.20 on

    def _norm(self, raw: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._experts.post_expert_norm(raw)
        return normed


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
