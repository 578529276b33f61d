"""LongCat-Flash: ids without weights, and a loop that cannot take one choice by itself."""

from __future__ import annotations

import torch

from experts.adapters.layers import Recorded, model_and_layer, routing


def test_identity_experts_need_no_weights() -> None:
    """Two of ten ids; a stack with ten rows of which eight are experts, and one with eight."""
    _, layer = model_and_layer("longcat_flash")
    assert (layer.num_experts, layer.num_ids) == (8, 10)
    assert {name: len(rows) for name, rows in layer.rows().items()} == {"gate_up_proj": 8, "down_proj": 8}
    assert [tensor.stack_shape[0] for tensor in layer.tensors] == [10, 8]


@torch.inference_mode()
def test_groups_with_and_without_identities_are_the_stock_loops_sum() -> None:
    _, layer = model_and_layer("longcat_flash")
    hidden, index, weights = routing(layer, tokens=12)
    assert (index >= 8).any()
    assert torch.equal(Recorded(layer)(hidden, index, weights), layer.experts(hidden, index, weights))


@torch.inference_mode()
def test_tokens_of_identities_only_need_nothing() -> None:
    _, layer = model_and_layer("longcat_flash")
    hidden, weights = torch.randn(3, 64), torch.rand(3, 2)
    index = torch.tensor([[8, 9]]).expand(3, 2)
    recorded = Recorded(layer)
    assert torch.equal(recorded(hidden, index, weights), layer.experts(hidden, index, weights))
    assert recorded.needed == []
