"""gpt-oss in MXFP4 in memory: refused with what to do instead, before and after its weights were swizzled."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import promoe
from promoe.errors import UnsupportedModelError


def mxfp4_model(swizzled: bool) -> PreTrainedModel:
    model = build("gpt_oss", layers=2)
    for layer in model.model.layers:
        layer.mlp.experts = experts = Mxfp4GptOssExperts(model.config)
        if swizzled:  # as after loading: no parameter any more, but a tensor of the kernel's own
            for name in ("gate_up_proj", "down_proj"):
                del experts._parameters[name]
                setattr(experts, name, object())
    return model


@pytest.mark.parametrize("swizzled", [False, True])
def test_refused_by_name_with_both_ways_out(swizzled: bool) -> None:
    model = mxfp4_model(swizzled)
    with pytest.raises(
        UnsupportedModelError, match=r"Mxfp4GptOssExperts.*swizzled.*promoe\.from_pretrained.*dequantize=True"
    ):
        promoe.patch(model, cache="50%")
    assert not hasattr(model, "promoe")
    assert type(model.model.layers[0].mlp.experts) is Mxfp4GptOssExperts
    assert torch.is_tensor(model.lm_head.weight)
