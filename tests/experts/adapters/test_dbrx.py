"""DBRX: flat parameters, a batch in shape, a gate that returns logits only."""

from __future__ import annotations

import torch

from experts.adapters.layers import Recorded, model_and_layer, routing


@torch.inference_mode()
def test_the_batch_keeps_its_shape() -> None:
    _, layer = model_and_layer("dbrx")
    hidden, index, weights = routing(layer)
    batch = hidden.view(2, 3, 64)
    recorded = Recorded(layer)
    found = layer.adapter.call(layer.experts, recorded)(batch, index, weights)
    assert torch.equal(found, layer.experts(batch, index, weights))
    assert recorded.calls[0][0].shape == (6, 64)


def test_matrices_are_parts_of_flat_parameters() -> None:
    _, layer = model_and_layer("dbrx")
    assert layer.paths == ("mlp.w1", "mlp.v1", "mlp.w2")
    w1 = layer.experts.get_parameter("mlp.w1")
    assert torch.equal(layer.rows()["mlp.w1"][2], w1.view(8, -1, 64)[2])


@torch.inference_mode()
def test_the_choice_is_the_blocks() -> None:
    _, layer = model_and_layer("dbrx")
    hidden = torch.randn(5, 64)
    logits = layer.gate(hidden)
    chosen = layer.chosen(logits)
    assert chosen is not None
    assert torch.equal(chosen, logits.topk(3).indices)
