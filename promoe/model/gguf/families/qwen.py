"""Qwen's Mixture-of-Experts models."""

from __future__ import annotations

from typing import Any

from .base import Family, File, Metadata, Shapes, common_fields, head_dim, rope
from .names import ATTENTION, EXPERTS, HEAD_NORMS, NORMS, renamings, stacked_experts

_QWEN3_MOE = {**NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}


def _expert_size(file: File) -> int:
    """Return the intermediate size of one expert."""
    used = max(file.whole("expert_used_count"), 1)
    return file.whole("expert_feed_forward_length", file.whole("feed_forward_length", 0) // used)


def _qwen3_moe_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    file.check_names({*_QWEN3_MOE, *EXPERTS})
    file.refuse_unless("expert_weights_scale", (0.0, 1.0), "which Qwen3MoE does not have")
    size = head_dim(file)
    return {
        "model_type": "qwen3_moe",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": file.whole("feed_forward_length", 0),
        "moe_intermediate_size": _expert_size(file),
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        # As llama.cpp computes: every layer has experts, and the chosen ones' weights add up to one.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": file.any_block_has("attn_q.bias"),
        "use_sliding_window": False,
        "hidden_act": "silu",
    }


QWEN3_MOE = Family(_qwen3_moe_config, lambda config: [*renamings(_QWEN3_MOE), *stacked_experts()])
