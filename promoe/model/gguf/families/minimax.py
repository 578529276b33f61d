"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, HEAD_NORMS, NORMS, renamed, renamings, stacked_experts

_BLOCKS = {**NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    file.refuse_unless("expert_gating_func", (2,), "but 2 (sigmoid) was expected")
    file.refuse_unless("expert_weights_scale", (0.0, 1.0), "which MiniMax-M2 does not have")
    size = head_dim(file)
    fields = {
        "model_type": "minimax_m2",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": {
            **rope(file),
            "partial_rotary_factor": file.whole("rope.dimension_count", size) / size,
        },
        "intermediate_size": file.whole("expert_feed_forward_length"),
        "num_local_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "hidden_act": "silu",
    }
    file.refuse_unless("feed_forward_length", (fields["intermediate_size"],), "but experts have another size")
    file.check({*_BLOCKS, *EXPERTS}, biases={"exp_probs_b"})
    return fields


def _conversions(config: Any) -> list[Any]:
    bias = renamed("exp_probs_b.bias", "mlp.e_score_correction_bias")
    return [*renamings(_BLOCKS), *stacked_experts(), bias]


MINIMAX_M2 = Family(_config, _conversions)
