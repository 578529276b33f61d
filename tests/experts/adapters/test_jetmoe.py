"""JetMoE: projections on rows that are sorted by expert already, and two of them beside one gate."""

from __future__ import annotations

import pytest
import torch

from experts.adapters.layers import Recorded, model_and_layer
from promoe.experts.moe_layers import find_moe_layers


@pytest.mark.parametrize("sizes", [[2, 0, 1, 3, 0, 0, 1, 0], [0] * 7 + [4], [1] * 8, [0] * 8])
@torch.inference_mode()
def test_rows_come_back_in_their_places(sizes: list[int]) -> None:
    _, layer = model_and_layer("jetmoe")
    rows, recorded = torch.randn(sum(sizes), 64), Recorded(layer)
    found = layer.adapter.call(layer.experts, recorded)(rows, sizes)
    assert torch.equal(found, layer.experts(rows, sizes))
    assert recorded.needed == [expert for expert, size in enumerate(sizes) if size]


def test_four_projections_per_decoder_layer_of_which_two_share_a_gate() -> None:
    model, _ = model_and_layer("jetmoe")
    layers = find_moe_layers(model)
    assert len(layers) == 4 * model.config.num_hidden_layers
    assert len({layer.gate_name for layer in layers}) == len(layers) // 2


@torch.inference_mode()
def test_the_choice_is_that_of_the_logits() -> None:
    _, layer = model_and_layer("jetmoe")
    output = layer.gate(torch.randn(5, 64))
    chosen = layer.chosen(output)
    assert chosen is not None
    assert torch.bincount(chosen.flatten(), minlength=8).tolist() == output[3]
