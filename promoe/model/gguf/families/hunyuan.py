"""Hunyuan-A13B."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, NORMS, renamings, stacked_experts

_BLOCKS = {
    **NORMS,
    **ATTENTION,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size, intermediate = head_dim(file), file.whole("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        file.refuse_unless(key, (intermediate,), f"but feed_forward_length is {intermediate}")
    file.refuse_unless("expert_shared_count", (1,), "but 1 was expected")
    # Rotation for long texts is in rope.freq_base already.
    file.ignore("rope.scaling.original_context_length")
    fields = {
        "model_type": "hunyuan_v1_moe",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": intermediate,
        "num_experts": file.whole("expert_count"),
        "moe_topk": file.whole("expert_used_count"),
        "attention_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }
    file.check({*_BLOCKS, *EXPERTS}, biases=ATTENTION)
    return fields


HUNYUAN_MOE = Family(_config, lambda config: [*renamings(_BLOCKS), *stacked_experts()])
