"""Quantised experts on a real GPU: `pytest -m cuda tests/cuda`. What `tests/test_quantised_on_device.py` promises, kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_twin import quantised, twin_of
from served import PROMPTS, close, greedy
from tiny_models import IMPLEMENTATIONS

import promoe
from promoe.experts.kernels.int4 import BITS, BLOCKS, Int4
from promoe.experts.kernels.int8 import Int8
from promoe.experts.kernels.quantized import Quantized

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = promoe.PromoeConfig(strict=True, ablation=promoe.Ablation(governor=False), chunk_bytes=4096)
SHAPE = (1024, 2048)
FORMATS = [Int8(SHAPE, False, None), *(Int4(SHAPE, False, None, bits, 64, block) for bits in BITS for block in BLOCKS)]


@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("matrix_format", FORMATS, ids=lambda one: f"{one.name}-{getattr(one, 'block', 0)}")
def test_a_gpu_expands_to_the_bits_of_the_processor(matrix_format: Quantized, spread: float) -> None:
    draw = torch.Generator().manual_seed(0)
    plain = [(spread * torch.randn(SHAPE, generator=draw)).to(torch.bfloat16) for _ in range(3)]
    content = torch.stack([matrix_format.pack(matrix) for matrix in plain])
    found = matrix_format.dense(matrix_format.parts(content.to("cuda")))
    assert found.is_cuda
    assert found.is_contiguous()
    expected = torch.stack([matrix_format.view(one).dense() for one in content])
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slot_format", ["int8", "int4", "int3", "int2"])
def test_answers_beside_the_model_with_expanded_experts(slot_format: str, implementation: str) -> None:
    """Bits where the kernel computes an expert by itself (eager); elsewhere the distance is bounded."""
    folder = quantised("qwen2_moe", slot_format)
    reference = twin_of(folder, slot_format).to("cuda")
    reference.set_experts_implementation(implementation)
    prompts = [{name: one.to("cuda") for name, one in prompt.items()} for prompt in PROMPTS.values()]
    for cache in ("5%", "30%", "100%"):
        arguments: dict[str, Any] = {"experts": slot_format, "device": "cuda", "cache": cache, "config": CONFIG}
        model = promoe.from_pretrained(folder, **arguments)
        model.set_experts_implementation(implementation)
        for prompt in prompts:
            found, expected = greedy(model, prompt), greedy(reference, prompt)
            if implementation == "eager":
                found.assert_equals(expected)
            assert (found.logits[0] - expected.logits[0]).abs().max() < 0.25
        close(model)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_the_host_does_not_wait_for_what_is_expanded(implementation: str, tokens: int) -> None:
    folder = quantised("qwen2_moe", "int4")
    model = promoe.from_pretrained(folder, experts="int4", device="cuda", cache="100%", predictor=None, config=CONFIG)
    model.set_experts_implementation(implementation)
    layer = promoe.find_moe_layers(model)[1]
    hidden = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(2):  # the first time, experts are copied and libraries are loaded
            layer.block(hidden)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            layer.block(hidden)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close(model)
