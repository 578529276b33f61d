"""Qwen3-Next and Qwen3.5-MoE, in which most layers have linear attention."""

from __future__ import annotations

from typing import Any

from promoe.stores.encodings.computed import NegatedExponential, PlusOne

from .base import Family
from .fields import common_fields, expert_size, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, HEAD_NORMS, computed, renamed, renamings, stacked_experts
from .operations import AsChannels, AsRow, GroupHeads, JoinByKeyHead
from .qwen import SHARED_EXPERT, SHARED_GATE

_BLOCKS = {
    **ATTENTION,
    **HEAD_NORMS,
    **SHARED_EXPERT,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ssm_norm": "linear_attn.norm",
}
_NAMES = {*_BLOCKS, *EXPERTS, SHARED_GATE, "attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out"}
# All norms but that of the linear attention multiply by 1 + weight.
_COMPUTED = {
    "output_norm.weight": PlusOne(),
    **{f"{name}.weight": PlusOne() for name in ("attn_norm", "post_attention_norm", *HEAD_NORMS)},
    "ssm_a": NegatedExponential(),
}


def _fields(file: File) -> dict[str, Any]:
    size = head_dim(file)
    interval = max(file.whole("full_attention_interval", 4), 1)
    values = file.whole("ssm.time_step_rank")
    file.refuse_unless("expert_weights_scale", (0.0, 1.0), "which Qwen's models do not have")
    return {
        **common_fields(file),
        "layer_types": [
            "linear_attention" if (idx + 1) % interval else "full_attention" for idx in range(file.num_layers)
        ],
        "head_dim": size,
        "rope_parameters": {
            **rope(file),
            "partial_rotary_factor": file.whole("rope.dimension_count", size) / size,
        },
        "linear_conv_kernel_dim": file.whole("ssm.conv_kernel"),
        "linear_num_key_heads": file.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.whole("ssm.state_size"),
        "linear_value_head_dim": file.whole("ssm.inner_size") // max(values, 1),
        "moe_intermediate_size": expert_size(file),
        "shared_expert_intermediate_size": file.whole("expert_shared_feed_forward_length"),
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "attention_bias": False,
        "hidden_act": "silu",
    }


def _qwen3_next_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    fields = {
        "model_type": "qwen3_next",
        **_fields(file),
        "intermediate_size": file.whole("feed_forward_length", 0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,  # as llama.cpp computes
    }
    file.check({*_NAMES, "ssm_in", "ssm_ba"}, {"ssm_dt"}, {"ssm_a"})
    return fields


def _qwen35_moe_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    fields = {"model_type": "qwen3_5_moe_text", **_fields(file)}
    file.ignore("feed_forward_length")  # no layer is dense
    sections = file.wholes("rope.dimension_sections") or [11, 11, 10]
    # Positions of text are the same in all sections.
    fields["rope_parameters"] |= {"mrope_section": [one for one in sections if one], "mrope_interleaved": True}
    file.check({*_NAMES, "ssm_alpha", "ssm_beta"}, {"ssm_dt"}, {"ssm_a"})
    return fields


def _common_conversions() -> list[Any]:
    return [
        *renamings(_BLOCKS),
        *stacked_experts(),
        computed([f"{SHARED_GATE}.weight"], "mlp.shared_expert_gate.weight", AsRow()),
    ]


def _qwen3_next_conversions(config: Any) -> list[Any]:
    join = JoinByKeyHead(config.linear_num_key_heads, config.linear_key_head_dim)
    return [
        *_common_conversions(),
        renamed("ssm_a", "linear_attn.A_log"),
        renamed("ssm_dt.bias", "linear_attn.dt_bias"),
        renamed("ssm_out.weight", "linear_attn.out_proj.weight"),
        renamed("ssm_ba.weight", "linear_attn.in_proj_ba.weight"),
        renamed("ssm_in.weight", "linear_attn.in_proj_qkvz.weight"),  # of the first files
        computed(["ssm_conv1d.weight"], "linear_attn.conv1d.weight", AsChannels()),
        computed(["attn_qkv.weight", "attn_gate.weight"], "linear_attn.in_proj_qkvz.weight", join),
    ]


def _qwen35_moe_conversions(config: Any) -> list[Any]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    after_keys = GroupHeads(keys, values, offset=2 * keys * config.linear_key_head_dim)
    rows = {
        "ssm_a": "A_log",
        "ssm_dt.bias": "dt_bias",
        "ssm_alpha.weight": "in_proj_a.weight",
        "ssm_beta.weight": "in_proj_b.weight",
        "attn_gate.weight": "in_proj_z.weight",
    }
    return [
        *_common_conversions(),
        *(computed([name], f"linear_attn.{target}", GroupHeads(keys, values)) for name, target in rows.items()),
        computed(["attn_qkv.weight"], "linear_attn.in_proj_qkv.weight", after_keys),
        computed(["ssm_conv1d.weight"], "linear_attn.conv1d.weight", after_keys, AsChannels()),
        computed(["ssm_out.weight"], "linear_attn.out_proj.weight", GroupHeads(keys, values, dim=1)),
    ]


QWEN3_NEXT = Family(_qwen3_next_config, _qwen3_next_conversions, _COMPUTED)
QWEN35_MOE = Family(_qwen35_moe_config, _qwen35_moe_conversions, _COMPUTED)
