"""DeepSeek-V2 and V3, and others of their form, such as Kimi-K2 and GLM-4.7-Flash: one architecture in llama.cpp."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, rope
from .file import File, Metadata, Shapes
from .names import DENSE, EXPERTS, NORMS, SHARED, computed, renamed, renamings, stacked_experts
from .operations import JoinKeysAndValues

_BLOCKS = {
    **NORMS,
    **DENSE,
    **SHARED,
    "ffn_gate_inp": "mlp.gate",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
_SOFTMAX, _SIGMOID = 1, 2


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    gating = file.whole("expert_gating_func", 0) or _SOFTMAX  # files of 2024 have no such key
    if gating not in (_SOFTMAX, _SIGMOID):
        raise file.error(f"expert_gating_func is {gating}, but 1 (softmax) or 2 (sigmoid) was expected")
    fields = {
        **common_fields(file),
        **_attention(file),
        **_experts(file),
        **(_version_3(file) if gating == _SIGMOID else _version_2(file)),
        "hidden_act": "silu",
    }
    file.check(
        {*_BLOCKS, *EXPERTS, "attn_k_b", "attn_v_b"},
        biases={"attn_q_a", "attn_kv_a_mqa", "attn_output"} | ({"exp_probs_b"} if gating == _SIGMOID else set()),
    )
    return fields


def _attention(file: File) -> dict[str, Any]:
    rotated = file.positive("rope.dimension_count")
    # Newer files say what a key has in the compressed form, where all heads share one, and beside it what a head has.
    keys = file.whole("attention.key_length_mla", file.whole("attention.key_length"))
    values = file.whole("attention.value_length_mla", file.whole("attention.value_length"))
    file.ignore("attention.key_length", "attention.value_length")
    if keys < rotated:
        raise file.error(f"its keys have {keys} elements per head, and {rotated} of them are rotated")
    if file.any_block_has("attn_kv_b.weight") and file.any_block_has("attn_k_b.weight"):
        raise file.error("it has keys and values of latent attention twice: as attn_kv_b and as attn_k_b and attn_v_b")
    return {
        "num_key_value_heads": file.whole("attention.head_count"),
        "q_lora_rank": file.whole("attention.q_lora_rank") if file.any_block_has("attn_q_a.weight") else None,
        "kv_lora_rank": file.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "rope_parameters": _rope(file),
        "attention_bias": file.any_block_has("attn_kv_a_mqa.bias"),
    }


def _rope(file: File) -> dict[str, Any]:
    found = rope(file)
    scale = file.real("rope.scaling.yarn_log_multiplier", 0.0)
    if found["rope_type"] != "yarn":
        return found
    if not scale:
        raise file.error("it stretches rotary embeddings (yarn), but has no rope.scaling.yarn_log_multiplier")
    # The file has a tenth of mscale_all_dim. llama.cpp takes `mscale` for equal, as it is in all published models.
    mscale = round(10 * scale, 6)
    return {**found, "mscale": mscale, "mscale_all_dim": mscale}


def _experts(file: File) -> dict[str, Any]:
    groups = file.whole("expert_group_count", 0)
    return {
        "intermediate_size": file.whole("feed_forward_length"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "first_k_dense_replace": file.whole("leading_dense_block_count", 0),
        "n_routed_experts": file.whole("expert_count"),
        "n_shared_experts": file.whole("expert_shared_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        # Files of before October 2025 have no groups: llama.cpp chooses among all experts then.
        "n_group": groups or 1,
        "topk_group": file.whole("expert_group_used_count", 0) or 1,
    }


def _version_2(file: File) -> dict[str, Any]:
    file.refuse_unless("expert_weights_norm", (False,), "which DeepSeek-V2 of Transformers does not do")
    grouped = file.whole("expert_group_count", 0) > 1
    return {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "norm_topk_prob": False,
    }


def _version_3(file: File) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "rope_interleave": True,
        "num_nextn_predict_layers": file.whole("nextn_predict_layers", 0),
    }


def _conversions(config: Any) -> list[Any]:
    return [
        *renamings(_BLOCKS),
        *stacked_experts(),
        renamed("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        computed(["attn_k_b.weight", "attn_v_b.weight"], "self_attn.kv_b_proj.weight", JoinKeysAndValues()),
    ]


DEEPSEEK2 = Family(_config, _conversions)
