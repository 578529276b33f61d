"""Nemotron 3: layers of Mamba-2, attention without positions, and experts without gates."""

from __future__ import annotations

from typing import Any

from promoe.errors import shown
from promoe.stores.encodings.computed import NegatedExponential

from .base import Family
from .fields import common_fields, head_dim
from .file import File, Metadata, Shapes
from .names import computed, halves, renamed, renamings
from .operations import AsChannels, Flat

_OUTER = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
_BLOCKS = {
    "attn_norm": "norm",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_OTHERS = ("attn_q", "attn_k", "ssm_conv1d", "ssm_norm", "ffn_up_exps", "ffn_down_exps")
# By a tensor that only layers of the kind have.
_KINDS = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_up_exps": "moe", "ffn_up": "mlp"}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    heads, inner = file.whole("ssm.time_step_rank"), file.whole("ssm.inner_size")
    key_heads, sizes = set(file.wholes("attention.head_count_kv")) - {0}, set(file.wholes("feed_forward_length")) - {0}
    if len(key_heads) != 1 or len(sizes) != 1:
        found = shown({"attention.head_count_kv": sorted(key_heads), "feed_forward_length": sorted(sizes)})
        raise file.error(f"its layers have {found}, but one number other than zero was expected for each")
    # Positions are not rotated.
    file.ignore("rope.freq_base", "rope.dimension_count", "attention.layer_norm_epsilon")
    common = common_fields(file, *key_heads)
    common["layer_norm_epsilon"] = common.pop("rms_norm_eps")
    fields = {
        "model_type": "nemotron_h",
        **common,
        "layers_block_type": [_kind(file, idx) for idx in range(file.num_layers)],
        "head_dim": head_dim(file),
        "intermediate_size": sizes.pop(),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": file.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": file.whole("moe_latent_size") if file.any_block_has("ffn_latent_down.weight") else None,
        "n_routed_experts": file.whole("expert_count"),
        "n_shared_experts": file.whole("expert_shared_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "n_group": file.whole("expert_group_count", 0) or 1,
        "topk_group": file.whole("expert_group_used_count", 0) or 1,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // max(heads, 1),
        "n_groups": file.whole("ssm.group_count"),
        "ssm_state_size": file.whole("ssm.state_size"),
        "conv_kernel": file.whole("ssm.conv_kernel"),
        "use_conv_bias": file.any_block_has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.any_block_has("ssm_in.bias"),
        "mlp_bias": file.any_block_has("ffn_up.bias"),
        "num_nextn_predict_layers": 0,
    }
    biases = {"ssm_in", "ssm_out", "ssm_conv1d", "ssm_dt", "ffn_up", "ffn_down", "exp_probs_b"}
    file.check({*_BLOCKS, *_OTHERS}, biases, others={"ssm_a", "ssm_d"})
    return fields


def _kind(file: File, layer_idx: int) -> str:
    """Return what a layer does, judged by its tensors."""
    kinds = [kind for name, kind in _KINDS.items() if f"blk.{layer_idx}.{name}.weight" in file.shapes]
    if len(kinds) != 1:
        raise file.error(f"layer {layer_idx} has the tensors of {kinds or 'no known kind of layer'}")
    return kinds[0]


def _conversions(config: Any) -> list[Any]:
    return [
        *renamings(_BLOCKS, _OUTER),
        *halves(config, "mixer"),
        renamed("ffn_up_exps.weight", "mixer.experts.up_proj"),
        renamed("ffn_down_exps.weight", "mixer.experts.down_proj"),
        renamed("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
        renamed("ssm_dt.bias", "mixer.dt_bias"),
        renamed("ssm_conv1d.bias", "mixer.conv1d.bias"),
        computed(["ssm_conv1d.weight"], "mixer.conv1d.weight", AsChannels()),
        computed(["ssm_a"], "mixer.A_log", Flat()),
        computed(["ssm_d"], "mixer.D", Flat()),
        computed(["ssm_norm.weight"], "mixer.norm.weight", Flat()),
    ]


NEMOTRON_H_MOE = Family(_config, _conversions, {"ssm_a": NegatedExponential()})
