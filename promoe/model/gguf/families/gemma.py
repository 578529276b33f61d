"""Gemma 4 with experts."""

from __future__ import annotations

from typing import Any

from promoe.errors import shown

from .base import Family
from .fields import common_fields
from .file import File, Metadata, Shapes
from .names import ATTENTION, DENSE, HEAD_NORMS, renamed, renamings, stacked_experts

_BLOCKS = {
    **ATTENTION,
    **HEAD_NORMS,
    **DENSE,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_OTHERS = ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "layer_output_scale")
_SCALES = {"ffn_gate_inp.scale", "ffn_down_exps.scale"}
# Says which part of a head full attention rotates: the first quarter, as in all published models.
_FREQUENCIES = "rope_freqs.weight"


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        file.refuse_unless(key, (0,), "which Gemma 4 with experts does not have")
    sliding = file.flags("attention.sliding_window_pattern")
    if len(sliding) != file.num_layers or not sliding[-1:] == [False]:
        raise file.error(
            f"attention.sliding_window_pattern is {shown(sliding)}, but one flag per layer, the last one false,"
        )
    local, whole = _heads(file, sliding)
    no_values = [f"blk.{idx}.attn_v.weight" not in shapes for idx, slides in enumerate(sliding) if not slides]
    if any(no_values) != all(no_values) or (local != whole and not any(no_values)):
        raise file.error(
            "its layers with full attention differ from each other, or from the others, in keys and values"
        )
    fields = {
        "model_type": "gemma4_text",
        **common_fields(file, local),
        **_head_sizes(file),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "num_global_key_value_heads": whole,
        "attention_k_eq_v": all(no_values),
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": file.positive("attention.sliding_window"),
        "final_logit_softcapping": file.real("final_logit_softcapping", 30.0),
        "intermediate_size": file.whole("feed_forward_length"),
        "enable_moe_block": True,
        "num_experts": file.whole("expert_count"),
        "top_k_experts": file.whole("expert_used_count"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    file.check({*_BLOCKS, *_OTHERS}, others={*_SCALES, _FREQUENCIES})
    return fields


def _heads(file: File, sliding: list[bool]) -> tuple[int, int]:
    """Return the heads of keys in layers with a sliding window, and in those with full attention."""
    counts = file.wholes("attention.head_count_kv") or [file.positive("attention.head_count_kv")] * len(sliding)
    local = {count for count, slides in zip(counts, sliding, strict=False) if slides}
    whole = {count for count, slides in zip(counts, sliding, strict=False) if not slides}
    if len(counts) != len(sliding) or len(local) != 1 or len(whole) != 1 or 0 in local | whole:
        raise file.error(
            f"attention.head_count_kv is {shown(counts)}, but one number for each kind of attention was expected"
        )
    return local.pop(), whole.pop()


def _head_sizes(file: File) -> dict[str, Any]:
    local, whole = file.positive("attention.key_length_swa"), file.positive("attention.key_length")
    file.refuse_unless("attention.value_length_swa", (local,), f"but keys have {local} elements per head")
    file.refuse_unless("attention.value_length", (whole,), f"but keys have {whole} elements per head")
    file.refuse_unless("rope.dimension_count_swa", (local,), f"but {local} was expected: the whole head")
    file.refuse_unless("rope.dimension_count", (whole,), f"but {whole} was expected: the whole head")
    if file.shapes.get(_FREQUENCIES) != (whole // 2,):
        raise file.error(f"it has no {_FREQUENCIES} of {whole // 2} elements")
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": file.real("rope.freq_base")}
    return {
        "head_dim": local,
        "global_head_dim": whole,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": file.real("rope.freq_base_swa")},
            "full_attention": full,
        },
    }


def _conversions(config: Any) -> list[Any]:
    return [
        *renamings(_BLOCKS),
        *stacked_experts("experts"),
        renamed("ffn_gate_inp.weight", "router.proj.weight"),
        renamed("ffn_gate_inp.scale", "router.scale"),
        renamed("ffn_down_exps.scale", "router.per_expert_scale"),
        renamed("layer_output_scale.weight", "layer_scalar"),
    ]


GEMMA4 = Family(_config, _conversions, unused=frozenset({_FREQUENCIES}))
