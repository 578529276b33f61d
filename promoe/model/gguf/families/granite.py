"""Granite with experts: 3.0 and 3.1, with or without a shared expert, and 4.0-H, in which most layers are Mamba-2."""

from __future__ import annotations

from typing import Any

from promoe.stores.encodings.computed import NegatedExponential

from .base import Family
from .fields import attention_layers, common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, NORMS, computed, halves, renamed, renamings, stacked_experts
from .operations import AsChannels, Flat

_BLOCKS = {
    **NORMS,
    "attn_v": ATTENTION["attn_v"],
    "attn_output": ATTENTION["attn_output"],
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_NAMES = {*_BLOCKS, *EXPERTS, "attn_q", "attn_k", "ffn_gate_shexp", "ffn_up_shexp"}
_MAMBA = ("ssm_in", "ssm_conv1d", "ssm_norm", "ssm_out")
_FINETUNED = "rope.scaling.finetuned"  # llama.cpp takes it for whether positions are rotated at all


def _fields(file: File, key_value_heads: int | None = None) -> dict[str, Any]:
    return {
        **common_fields(file, key_value_heads),
        "rope_parameters": rope(file, rotated=head_dim(file)),
        "intermediate_size": file.whole("feed_forward_length"),
        "num_local_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "attention_multiplier": file.real("attention.scale"),
        "embedding_multiplier": file.real("embedding_scale"),
        "residual_multiplier": file.real("residual_scale"),
        "logits_scaling": file.real("logit_scale"),
        "attention_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    file.refuse_unless(_FINETUNED, (True,), "so its attention knows no positions")
    fields = {"model_type": "granitemoe", **_fields(file)}
    if file.any_block_has("ffn_up_shexp.weight"):
        fields["model_type"] = "granitemoeshared"
        fields["shared_intermediate_size"] = file.whole("expert_shared_feed_forward_length")
    file.check(_NAMES, biases=ATTENTION)
    return fields


def _hybrid_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    attention, key_heads = attention_layers(file)
    inner, heads, hidden = (
        file.whole("ssm.inner_size"),
        file.whole("ssm.time_step_rank"),
        file.whole("embedding_length"),
    )
    if not heads or not hidden or inner % heads or inner % hidden:
        raise file.error(
            f"ssm.inner_size is {inner}, but a multiple of {heads} heads and {hidden} hidden units was expected"
        )
    fields = {
        "model_type": "granitemoehybrid",
        **_fields(file, key_heads),
        "shared_intermediate_size": file.whole("expert_shared_feed_forward_length"),
        "layer_types": ["full_attention" if one else "linear_attention" for one in attention],
        "position_embedding_type": "rope" if file.flag(_FINETUNED, True) else "nope",
        "mamba_n_heads": heads,
        "mamba_n_groups": file.whole("ssm.group_count"),
        "mamba_d_state": file.whole("ssm.state_size"),
        "mamba_d_head": inner // heads,
        "mamba_d_conv": file.whole("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": file.any_block_has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.any_block_has("ssm_in.bias"),
    }
    biases = {*ATTENTION, "ssm_conv1d", "ssm_in", "ssm_out", "ssm_dt"}
    file.check({*_NAMES, *_MAMBA}, biases, others={"ssm_a", "ssm_d"})
    return fields


def _conversions(config: Any) -> list[Any]:
    from transformers.core_model_loading import Concatenate

    shared = ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]
    return [
        *renamings(_BLOCKS),
        *halves(config),
        *stacked_experts("block_sparse_moe.experts"),
        computed(shared, "shared_mlp.input_linear.weight", Concatenate(dim=0)),
    ]


def _hybrid_conversions(config: Any) -> list[Any]:
    kinds = ("weight", "bias")
    return [
        *_conversions(config),
        *(renamed(f"ssm_{one}.{kind}", f"mamba.{one}_proj.{kind}") for one in ("in", "out") for kind in kinds),
        renamed("ssm_dt.bias", "mamba.dt_bias"),
        renamed("ssm_conv1d.bias", "mamba.conv1d.bias"),
        computed(["ssm_conv1d.weight"], "mamba.conv1d.weight", AsChannels()),
        computed(["ssm_a"], "mamba.A_log", Flat()),
        computed(["ssm_d"], "mamba.D", Flat()),
        computed(["ssm_norm.weight"], "mamba.norm.weight", Flat()),
    ]


GRANITE_MOE = Family(_config, _conversions)
GRANITE_HYBRID = Family(_hybrid_config, _hybrid_conversions, {"ssm_a": NegatedExponential()})
