"""Products with the matrices of experts, in any slot format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from promoe.transfer.rows import Row

# Multiplies `x[P, in]` by a matrix `[in, width]`; writes the result into a tensor, if it gets one, and returns it.
Multiply = Callable[[torch.Tensor, Row, torch.Tensor | None], torch.Tensor]
# The name of the second product's matrix. Names of all tensors that only the second product reads begin with it.
SECOND = "down_proj"


def first_name(experts: nn.Module) -> str:
    """Return the name of the matrix of the first product, of a module that `use_experts_implementation` made."""
    module: Any = experts
    return "gate_up_proj" if module.has_gate else "up_proj"


def activate(experts: nn.Module, first: torch.Tensor) -> torch.Tensor:
    """Return the second product's input from the first one's result, of a module that `use_experts_implementation` made."""
    module: Any = experts
    activated: torch.Tensor = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    return activated


def has_norm(experts: nn.Module) -> bool:
    """Return whether the module normalises the rows after the second product, by `post_expert_norm`."""
    return getattr(experts, "has_post_expert_norm", False)  # Transformers has it from 5.20 on


def factors(rows: Sequence[Row], transposed: bool) -> list[Row]:
    """Return rows as right factors `[in, out]`. Plain `[out, in]` rows are `transposed`; other formats are factors already."""
    return [row.t() if transposed and isinstance(row, torch.Tensor) else row for row in rows]


def products(
    x: torch.Tensor,
    matrices: Sequence[Row],
    sizes: Sequence[int],
    width: int,
    out: torch.Tensor | None = None,
    multiply: Multiply | None = None,
) -> torch.Tensor:
    """Multiply the next `sizes[i]` rows of `x[S, in]` by `matrices[i]` `[in, width]`; return `[S, width]` (`out`).

    `multiply` makes each product; None: `product` does.
    """
    multiply = multiply or product
    if out is None:
        out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    for x_rows, matrix, out_rows in zip(x.split(sizes), matrices, out.split(sizes), strict=True):
        multiply(x_rows, matrix, out_rows)
    return out


def product(x: torch.Tensor, matrix: Row, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x[P, in]` by `matrix` `[in, width]`; return `[P, width]` (`out`)."""
    if not isinstance(matrix, torch.Tensor):
        return matrix.multiply(x, out)
    if out is None:
        out = x.new_empty((x.shape[0], matrix.shape[1]))
    # With `out=`, autocast does not apply to the product, as it does not to torch's grouped_mm.
    return torch.mm(x, matrix, out=out)
