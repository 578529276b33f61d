"""Qwen's Mixture-of-Experts models."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, expert_size, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, HEAD_NORMS, NORMS, computed, renamings, stacked_experts
from .operations import AsRow

SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_GATE = "ffn_gate_inp_shexp"
_QWEN2_MOE = {**NORMS, **ATTENTION, **SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"}
_QWEN3_MOE = {**NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}


def _experts(file: File) -> dict[str, Any]:
    """Return the fields of the experts, which all layers have."""
    file.refuse_unless("expert_weights_scale", (0.0, 1.0), "which Qwen's models do not have")
    return {
        "intermediate_size": file.whole("feed_forward_length", 0),
        "moe_intermediate_size": expert_size(file),
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "hidden_act": "silu",
    }


def _qwen2_moe_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size = head_dim(file)
    if size * file.whole("attention.head_count") != file.whole("embedding_length"):
        raise file.error(f"its heads have {size} elements, but Qwen2MoE divides the hidden size among them")
    fields = {
        "model_type": "qwen2_moe",
        **common_fields(file),
        **_experts(file),
        "rope_parameters": rope(file, rotated=size),
        "shared_expert_intermediate_size": file.whole(
            "expert_shared_feed_forward_length", file.whole("feed_forward_length", 0)
        ),
        # llama.cpp does not make the chosen experts' weights add up to one, and no file of it says that it should.
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "qkv_bias": file.any_block_has("attn_q.bias"),
    }
    file.check({*_QWEN2_MOE, *EXPERTS, SHARED_GATE}, biases={"attn_q", "attn_k", "attn_v"})
    return fields


def _qwen2_moe_conversions(config: Any) -> list[Any]:
    shared_gate = computed([f"{SHARED_GATE}.weight"], "mlp.shared_expert_gate.weight", AsRow())
    return [*renamings(_QWEN2_MOE), *stacked_experts(), shared_gate]


def _qwen3_moe_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size = head_dim(file)
    # Of Qwen3-VL, whose language model is the same: positions of text are equal in all sections.
    file.ignore("rope.dimension_sections", "n_deepstack_layers")
    fields = {
        "model_type": "qwen3_moe",
        **common_fields(file),
        **_experts(file),
        "head_dim": size,
        "rope_parameters": rope(file, rotated=size),
        "norm_topk_prob": True,  # as llama.cpp computes
        "attention_bias": file.any_block_has("attn_q.bias"),
    }
    file.check({*_QWEN3_MOE, *EXPERTS}, biases=ATTENTION)
    return fields


QWEN2_MOE = Family(_qwen2_moe_config, _qwen2_moe_conversions)
QWEN3_MOE = Family(_qwen3_moe_config, lambda config: [*renamings(_QWEN3_MOE), *stacked_experts()])
