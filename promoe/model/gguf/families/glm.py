"""GLM-4.5 and its successors of the same form."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, DENSE, EXPERTS, HEAD_NORMS, SHARED, renamed, renamings, stacked_experts

_BLOCKS = {
    **ATTENTION,
    **HEAD_NORMS,
    **DENSE,
    **SHARED,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    file.refuse_unless("expert_gating_func", (2, 0), "but 2 (sigmoid) was expected")
    size = head_dim(file)
    fields = {
        "model_type": "glm4_moe",
        **common_fields(file),
        "num_nextn_predict_layers": file.whole("nextn_predict_layers", 0),
        "head_dim": size,
        "rope_parameters": {**rope(file), "partial_rotary_factor": file.whole("rope.dimension_count") / size},
        "intermediate_size": file.whole("feed_forward_length"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "first_k_dense_replace": file.whole("leading_dense_block_count", 0),
        "n_routed_experts": file.whole("expert_count"),
        "n_shared_experts": file.whole("expert_shared_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "n_group": file.whole("expert_group_count", 0) or 1,
        "topk_group": file.whole("expert_group_used_count", 0) or 1,
        "use_qk_norm": file.any_block_has("attn_q_norm.weight"),
        "attention_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }
    file.check({*_BLOCKS, *EXPERTS}, biases={"attn_q", "attn_k", "attn_v", "exp_probs_b"})
    return fields


def _conversions(config: Any) -> list[Any]:
    bias = renamed("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")
    return [*renamings(_BLOCKS), *stacked_experts(), bias]


GLM4_MOE = Family(_config, _conversions)
