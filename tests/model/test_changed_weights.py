from __future__ import annotations

import pytest
import torch
from experts.adapters.layers import model_and_layer
from tiny_models import build

from promoe.errors import PatchStateError
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.changed_weights import LiveWeights


def test_an_expert_with_parameters_of_its_own_is_looked_at_where_it_is_used() -> None:
    _, layer = model_and_layer("nllb_moe")
    live = LiveWeights(layer)
    with torch.no_grad():
        layer.parameters()[0].add_(1.0)
    live.check([1, 2, 3])
    with pytest.raises(PatchStateError, match="wrote to"):
        live.check([3, 0])


def test_reading_is_no_change() -> None:
    layer = find_moe_layers(build("qwen2_moe"))[0]
    live = LiveWeights(layer)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
        parameter.detach().sum()
    live.check(range(layer.num_experts))


def test_of_tensors_whose_changes_torch_does_not_count_the_place_is_looked_at() -> None:
    with torch.inference_mode():
        layer = find_moe_layers(build("qwen2_moe"))[0]
        live = LiveWeights(layer)
        live.check([0])
        layer.experts.down_proj = torch.nn.Parameter(layer.experts.down_proj * 2, requires_grad=False)
        with pytest.raises(PatchStateError, match="replaced 'down_proj'"):
            live.check([0])
