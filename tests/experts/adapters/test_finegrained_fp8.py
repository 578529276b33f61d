"""FP8 experts in memory. Their kernels need a GPU: here torch's arithmetic is in their place, and all else is Transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build, token_ids
from torch import nn
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.integrations import finegrained_fp8
from zoo.exactness import assert_equal, outputs, served

import promoe
from promoe.errors import UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers

BLOCK = 32
FORMATS: dict[str, dict[str, Any]] = {
    "blocks": {"weight_block_size": (BLOCK, BLOCK)},
    "whole tensors": {"weight_block_size": None},
    "scales that are powers of two": {"weight_block_size": (BLOCK, BLOCK), "scale_fmt": "ue8m0"},
    "static": {"weight_block_size": (BLOCK, BLOCK), "activation_scheme": "static"},
    "fp4": {"weight_block_size": (BLOCK, BLOCK), "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
}


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)


def linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block_size: Any = None,
    bias: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    allow_deepgemm: bool = True,
) -> torch.Tensor:
    """What the kernels compute: every scale, also that of the input, has its part in the result."""
    values = weight.float()
    if weight.dtype == torch.int8:  # two values in a byte
        values = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).float()
    rows, columns = (-(-size // count) for size, count in zip(values.shape, scales.shape, strict=True))
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = values * spread[: values.shape[0], : values.shape[1]]
    if activation_scale is not None:
        hidden = (hidden / activation_scale).to(torch.float8_e4m3fn).to(hidden.dtype) * activation_scale
    return F.linear(hidden, values.to(hidden.dtype), bias)


def fp8_model(fields: dict[str, Any], implementation: str = "eager") -> PreTrainedModel:
    """A tiny model whose experts are what Transformers puts in for an FP8 checkpoint, with random weights and scales."""
    model = build("qwen3_moe", dtype=torch.bfloat16, layers=3, experts_implementation=implementation)
    config = FineGrainedFP8Config(**{name: value for name, value in fields.items() if name != "expert_dtype"})
    config.expert_dtype = model.config.expert_dtype = fields.get("expert_dtype", "fp8")
    config.dequantize = False
    finegrained_fp8.replace_with_fp8_linear(model, [r".*\.[qkvo]_proj", "lm_head"], config)
    torch.manual_seed(0)
    for layer in model.model.layers:
        experts = layer.mlp.experts.to_empty(device="cpu").eval()
        assert type(experts).__name__ == "FP8Experts"
        for name, parameter in experts.named_parameters():
            values = random_values(name, parameter)
            setattr(experts, name, nn.Parameter(values.to(parameter.dtype), requires_grad=False))
    return model


def random_values(name: str, parameter: torch.Tensor) -> torch.Tensor:
    if "scale" in name:
        return torch.randint(-3, 3, parameter.shape).float().exp2() / (8 if "inv" in name else 1)
    if parameter.dtype == torch.int8:
        return torch.randint(-128, 128, parameter.shape)
    return torch.randn(parameter.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_scales_are_served_as_they_are(name: str) -> None:
    model = fp8_model(FORMATS[name])
    layer = find_moe_layers(model)[0]
    assert set(layer.paths) == {path for path, _ in layer.experts.named_parameters()}
    expert_bytes = sum(parameter[0].numel() * parameter.element_size() for parameter in layer.experts.parameters())
    assert layer.layout.payload_bytes == expert_bytes
    if fields := FORMATS[name].get("expert_dtype"):
        assert (fields, layer.layout["down_proj"].nbytes) == ("fp4", model.config.moe_intermediate_size * 64 // 2)
    tokens = {"input_ids": token_ids(2, 6, seed=1)}
    expected = outputs(model, tokens)
    before = {path: parameter.clone() for path, parameter in model.named_parameters()}
    with served(model, slots=9):
        assert_equal(outputs(model, tokens), expected)
        assert model.promoe.stats().evictions > 0
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[path].view(torch.uint8)), path


def test_a_scale_is_part_of_what_is_compared() -> None:
    """The double would be no test if the output did not depend on every tensor of an expert."""
    model = fp8_model(FORMATS["static"])
    tokens = {"input_ids": token_ids(2, 6, seed=1)}
    expected = outputs(model, tokens)[0]
    for name, parameter in model.model.layers[1].mlp.experts.named_parameters():
        kept = parameter.data.clone()
        parameter.data.copy_((parameter.float() * 2).to(parameter.dtype))
        assert not torch.equal(outputs(model, tokens)[0], expected), name
        parameter.data.copy_(kept)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "deepgemm", "deepgemm_megamoe"])
def test_kernels_that_step_through_the_stack_are_refused(implementation: str) -> None:
    model = fp8_model(FORMATS["blocks"])
    model.config._experts_implementation = implementation
    with pytest.raises(
        UnsupportedModelError, match=rf"\(FP8Experts\).*'{implementation}'.*set_experts_implementation\('eager'\)"
    ):
        promoe.patch(model, cache="50%")
    assert not hasattr(model, "promoe")
