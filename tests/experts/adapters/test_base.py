"""Where an expert's tensors are, however they are kept."""

from __future__ import annotations

import torch
from torch import nn

from promoe.experts.adapters.base import ExpertTensor, get_tensor, is_buffer, set_tensor


class Kept(nn.Module):
    """A parameter and a buffer, one of them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 6, bias=False)
        self.register_buffer("scale", torch.arange(3.0))


def test_a_flat_parameter_is_split_into_experts_without_a_copy() -> None:
    module = Kept()
    tensor = ExpertTensor.stack("inner.weight", module.inner.weight, (2, 2))
    rows = tensor.rows(module, 3)
    assert isinstance(rows, torch.Tensor)
    assert rows.shape == (3, 2, 2)
    assert rows.data_ptr() == module.inner.weight.data_ptr()
    assert tensor.stack_shape == (6, 2)


def test_rows_that_belong_to_no_expert_are_left_out() -> None:
    module = Kept()
    assert len(ExpertTensor.stack("inner.weight", module.inner.weight, (2, 2)).rows(module, 2)) == 2


def test_a_parameter_per_expert_is_a_list_of_them() -> None:
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    tensor = ExpertTensor("weight", (2, 2), torch.float32, ("0.weight", "1.weight", "2.weight"), (2, 2))
    rows = tensor.rows(module, 3)
    assert [row.data_ptr() for row in rows] == [linear.weight.data_ptr() for linear in module]  # type: ignore[union-attr]


def test_parameters_and_buffers_are_replaced_where_they_are() -> None:
    module = Kept()
    other, scale = nn.Parameter(torch.zeros(6, 2)), torch.ones(3)
    set_tensor(module, "inner.weight", other)
    set_tensor(module, "scale", scale)
    assert module.inner.weight is get_tensor(module, "inner.weight") is other
    assert module.scale is scale
    assert (is_buffer(module, "scale"), is_buffer(module, "inner.weight")) == (True, False)
