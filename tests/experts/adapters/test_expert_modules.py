"""Experts that are modules: Switch Transformers' one-hot masks, and NLLB-MoE's ids."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.adapters.layers import Recorded, model_and_layer, routing


@pytest.mark.parametrize("dropped", [[], [1], [0, 2, 4], [0, 1, 2, 3, 4, 5]])
@torch.inference_mode()
def test_switch_tokens_beyond_the_capacity_have_no_expert(dropped: list[int]) -> None:
    _, layer = model_and_layer("switch_transformers")
    hidden, index, weights = routing(layer, top_k=1)
    mask = nn.functional.one_hot(index, num_classes=8)
    mask[dropped] = 0
    found = layer.adapter.call(layer.experts, Recorded(layer))(hidden, mask, weights)
    assert torch.equal(found, layer.experts(hidden, mask, weights))
    assert not found[dropped].any()


@torch.inference_mode()
def test_switch_chooses_what_the_mask_says() -> None:
    _, layer = model_and_layer("switch_transformers")
    output = layer.gate(torch.randn(1, 5, 64))
    chosen = layer.chosen(output)
    assert chosen is not None
    (mask,) = [part for part in output if not part.is_floating_point()]
    assert mask.flatten(0, -2)[torch.arange(5), chosen[:, 0]].all()


@torch.inference_mode()
def test_nllb_in_groups_is_nllb_at_once() -> None:
    _, layer = model_and_layer("nllb_moe")
    hidden, _, weights = routing(layer, top_k=8)
    mask = torch.randint(0, 2, (6, 8), generator=torch.Generator().manual_seed(0))
    recorded = Recorded(layer, size=1)
    assert torch.equal(recorded(hidden, mask, weights), layer.experts(hidden, mask, weights))
    assert recorded.needed == [0, 1]


def test_every_expert_has_parameters_of_its_own() -> None:
    _, layer = model_and_layer("nllb_moe")
    assert [tensor.name for tensor in layer.tensors] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert layer.paths[:2] == ("expert_0.fc1.weight", "expert_1.fc1.weight")
    expert = layer.experts.get_submodule("expert_3")
    assert layer.rows()["fc2.bias"][3] is expert.get_parameter("fc2.bias")


def test_experts_that_differ_are_a_problem() -> None:
    _, layer = model_and_layer("switch_transformers")
    layer.experts["expert_2"].wi = nn.Linear(64, 32, bias=False)  # type: ignore[index]
    assert layer.adapter.problem(layer.experts) == "its experts have different tensors"
