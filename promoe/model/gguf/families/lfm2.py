"""LFM2 with experts: short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import attention_layers, common_fields, rope
from .file import File, Metadata, Shapes
from .names import EXPERTS, computed, renamed, renamings, stacked_experts
from .operations import AsChannels

_OUTER = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_BLOCKS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    attention, key_heads = attention_layers(file)
    if file.whole("expert_gating_func") != 2:
        raise file.error("expert_gating_func is not 2 (sigmoid)")
    size = file.positive("embedding_length") // file.positive("attention.head_count")
    for key in ("attention.key_length", "attention.value_length"):
        file.refuse_unless(key, (size,), "but LFM2 divides the hidden size among its heads")
    common = common_fields(file, key_heads)
    common["norm_eps"] = common.pop("rms_norm_eps")
    fields = {
        "model_type": "lfm2_moe",
        **common,
        "layer_types": ["full_attention" if one else "conv" for one in attention],
        "rope_parameters": rope(file, rotated=size),
        "conv_L_cache": file.whole("shortconv.l_cache"),
        "conv_bias": False,
        "intermediate_size": file.whole("feed_forward_length"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "num_dense_layers": file.whole("leading_dense_block_count", 0),
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "use_expert_bias": file.any_block_has("exp_probs_b.bias"),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": True,  # as llama.cpp computes
    }
    file.check({*_BLOCKS, *EXPERTS, "shortconv.conv"}, {"exp_probs_b"}, {"token_embd_norm.weight"})
    return fields


def _conversions(config: Any) -> list[Any]:
    return [
        *renamings(_BLOCKS, _OUTER),
        *stacked_experts("feed_forward.experts"),
        renamed("exp_probs_b.bias", "feed_forward.expert_bias"),
        computed(["shortconv.conv.weight"], "conv.conv.weight", AsChannels()),
    ]


LFM2_MOE = Family(_config, _conversions)
