"""ERNIE 4.5 with experts."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, DENSE, EXPERTS, NORMS, SHARED, computed, renamings, stacked_experts
from .operations import AsRow

_BLOCKS = {**NORMS, **ATTENTION, **DENSE, **SHARED, "ffn_gate_inp": "mlp.gate"}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size = head_dim(file)
    if size * file.whole("attention.head_count") != file.whole("embedding_length"):
        raise file.error(f"its heads have {size} elements, but ERNIE 4.5 divides the hidden size among them")
    file.ignore("expert_shared_feed_forward_length")  # converters write another number than tensors have
    fields = {
        "model_type": "ernie4_5_moe",
        **common_fields(file),
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": file.whole("feed_forward_length"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "moe_num_experts": file.whole("expert_count"),
        "moe_k": file.whole("expert_used_count"),
        "moe_num_shared_experts": file.whole("expert_shared_count", 0),
        "moe_layer_start_index": file.whole("leading_dense_block_count", 0),
        "moe_layer_end_index": max(file.num_layers - 1, 0),
        "moe_layer_interval": max(file.whole("interleave_moe_layer_step"), 1),
        "use_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }
    file.check({*_BLOCKS, *EXPERTS}, biases={*ATTENTION, "exp_probs_b"})
    return fields


def _conversions(config: Any) -> list[Any]:
    bias = computed(["exp_probs_b.bias"], "mlp.gate.moe_statics.e_score_correction_bias", AsRow())
    return [*renamings(_BLOCKS), *stacked_experts(), bias]


ERNIE4_5_MOE = Family(_config, _conversions)
