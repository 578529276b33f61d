"""dots.llm1."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, expert_size, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, DENSE, EXPERTS, HEAD_NORMS, NORMS, SHARED, renamed, renamings, stacked_experts

_BLOCKS = {**NORMS, **ATTENTION, **HEAD_NORMS, **DENSE, **SHARED, "ffn_gate_inp": "mlp.gate"}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    if file.whole("expert_gating_func") != 2:
        raise file.error("expert_gating_func is not 2 (sigmoid)")
    size = head_dim(file)
    fields = {
        "model_type": "dots1",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": file.whole("feed_forward_length"),
        "moe_intermediate_size": expert_size(file),
        "first_k_dense_replace": file.whole("leading_dense_block_count", 0),
        "n_routed_experts": file.whole("expert_count"),
        "n_shared_experts": file.whole("expert_shared_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "n_group": file.whole("expert_group_count", 0) or 1,
        "topk_group": file.whole("expert_group_used_count", 0) or 1,
        "sliding_window": None,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    file.check({*_BLOCKS, *EXPERTS}, biases={"exp_probs_b"})
    return fields


def _conversions(config: Any) -> list[Any]:
    bias = renamed("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")
    return [*renamings(_BLOCKS), *stacked_experts(), bias]


DOTS1 = Family(_config, _conversions)
