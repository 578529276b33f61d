"""A vision-language model with its experts served: what it says about an image is what the unmodified model says."""

from __future__ import annotations

import pytest
import torch
from tiny_models import spread_weights
from transformers import PreTrainedModel, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from generation.compared import Call, assert_same_patched

IMAGE, IMAGE_START, IMAGE_END = 120, 121, 122
IMAGE_PROMPT = torch.tensor([[5, IMAGE_START, *[IMAGE] * 4, IMAGE_END, 9, 10]])


def vision_language_model() -> PreTrainedModel:
    """A tiny Qwen3-VL-MoE: images of 16 x 16 pixels in patches of 4 x 4, four of which make a token."""
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens))
    spread_weights(model)
    model.set_experts_implementation("grouped_mm")
    served: PreTrainedModel = model.eval()
    return served


def describing(seed: int) -> Call:
    """Generation about a random image."""
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    inputs = {
        "input_ids": IMAGE_PROMPT,
        "attention_mask": torch.ones_like(IMAGE_PROMPT),
        "mm_token_type_ids": (IMAGE_PROMPT == IMAGE).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    return lambda model: model.generate(
        **inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


@pytest.mark.parametrize("predictor", ["gate", "random"])
def test_a_model_that_sees(predictor: str) -> None:
    model = vision_language_model()
    stats = assert_same_patched(describing(1), model, predictor=predictor)
    assert (stats.prefill.passes, stats.decode.passes) == (1, 4)
    assert stats.prefill.tokens == 9
    one, other = describing(1)(model), describing(2)(model)
    assert not torch.equal(one.logits[0], other.logits[0]), "the image makes no difference"
