"""OpenAI's gpt-oss."""

from __future__ import annotations

from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, computed, renamed, renamings

_BLOCKS = {
    **ATTENTION,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def _config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    file.refuse_unless("expert_gating_func", (3, 0, 1), "but the softmax of the chosen experts' scores was expected")
    size = head_dim(file)
    rotation = rope(file, rotated=size)
    if rotation["rope_type"] == "yarn":
        rotation["truncate"] = False  # as published; files do not say it
    fields = {
        "model_type": "gpt_oss",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": rotation,
        "intermediate_size": file.whole("expert_feed_forward_length", file.whole("feed_forward_length", 0)),
        "num_local_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "sliding_window": file.whole("attention.sliding_window"),
        # As published: every other layer attends to a window, the first among them.
        "layer_types": ["full_attention" if idx % 2 else "sliding_attention" for idx in range(file.num_layers)],
        "attention_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }
    experts = {f"ffn_{one}_exps" for one in ("gate", "up", "down")}
    file.check({*_BLOCKS, *experts, "attn_sinks"}, biases={*ATTENTION, *experts, "ffn_gate_inp"})
    return fields


def _conversions(config: Any) -> list[Any]:
    from transformers.core_model_loading import Concatenate, Interleave, Transpose

    both = [f"ffn_{one}_exps" for one in ("gate", "up")]
    return [
        *renamings(_BLOCKS),
        renamed("attn_sinks.weight", "self_attn.sinks"),
        renamed("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
        computed(["ffn_down_exps.weight"], "mlp.experts.down_proj", Transpose(1, 2)),
        # The model has weights as [E, in, out], and the outputs of gate and up in turns.
        computed(
            [f"{one}.weight" for one in both],
            "mlp.experts.gate_up_proj",
            Concatenate(dim=1),
            Interleave(dim=1, inverse=True),
            Transpose(1, 2),
        ),
        computed(
            [f"{one}.bias" for one in both],
            "mlp.experts.gate_up_proj_bias",
            Concatenate(dim=1),
            Interleave(dim=1, inverse=True),
        ),
    ]


GPT_OSS = Family(_config, _conversions)
