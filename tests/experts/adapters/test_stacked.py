"""The general contract: what meets it, with and without the decorator, and what is missing where it is not met."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from experts.adapters.layers import Recorded, model_and_layer, routing
from promoe.experts.adapters import adapter_for
from promoe.experts.adapters.stacked import StackedAdapter


def test_an_undecorated_loop_with_the_contracts_arguments_is_served() -> None:
    """Step3p7's: its own loop is what runs, in groups, with the same bits."""
    _, layer = model_and_layer("step3p7")
    assert type(layer.adapter) is StackedAdapter
    assert layer.implementation == "eager"
    hidden, index, weights = routing(layer)
    with torch.inference_mode():
        assert torch.equal(Recorded(layer)(hidden, index, weights), layer.experts(hidden, index, weights))


class Stack(nn.Module):
    """Half way to the contract."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))
        for name, value in attributes.items():
            setattr(self, name, value)


class SomeExperts(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Contract(Stack):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.Linear(2, 2), ""),
        (SomeExperts(), "it is not built with use_experts_implementation"),
        (Contract(), "it does not say how many there are"),
        (Contract(num_experts=4), None),
        (Contract(num_experts=5), r"weight has shape \(4, 2, 2\) where \[5, ...\]"),
        (Contract(num_experts=4, extra=nn.Parameter(torch.zeros(3))), r"extra has shape \(3,\)"),
    ],
)
def test_what_is_missing_is_said(module: nn.Module, problem: str | None) -> None:
    found = adapter_for(module).problem(module)
    if problem:
        assert found is not None
        assert re.search(problem, found), found
    else:
        assert found == problem
