"""Models of Llama's form with experts: Mixtral, OLMoE and Granite."""

from __future__ import annotations

import re
from typing import Any

from .base import Family, File, Metadata, Shapes, common_fields, head_dim, rope
from .names import ATTENTION, EXPERTS, HEAD_NORMS, NORMS, computed, halves, renamings, stacked_experts

_MIXTRAL = {**NORMS, "attn_v": ATTENTION["attn_v"], "attn_output": ATTENTION["attn_output"], "ffn_gate_inp": "mlp.gate"}
_OLMOE = {**NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}
_GRANITE = {
    **{name: module for name, module in _MIXTRAL.items() if name != "ffn_gate_inp"},
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _mixtral_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    if file.whole("expert_count", 0) == 0:
        raise file.error("it has no experts (expert_count), so there is nothing to offload")
    file.refuse_unless("expert_weights_scale", (0.0, 1.0), "which Mixtral does not have")
    size = head_dim(file)
    fields = {
        "model_type": "mixtral",
        **common_fields(file),
        "head_dim": size,
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": file.whole("expert_feed_forward_length", file.whole("feed_forward_length")),
        "num_local_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "sliding_window": None,
        "hidden_act": "silu",
    }
    # Files of 2023 have one tensor per expert: "ffn_gate.0".
    numbered = {match[1] for name in shapes if (match := re.search(r"\.(ffn_(?:gate|up|down)\.\d+\.weight)$", name))}
    file.check({*_MIXTRAL, "attn_q", "attn_k", *EXPERTS}, others=numbered)
    return fields


def _mixtral_conversions(config: Any) -> list[Any]:
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

    per_expert = [
        *(
            WeightRenaming(rf"\.ffn_{one}\.(\d+)\.weight", rf".mlp.experts.\1.{one}_proj.weight")
            for one in ("gate", "up", "down")
        ),
        WeightConverter(
            source_patterns=[f"mlp.experts.*.{one}_proj.weight" for one in ("gate", "up")],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    return [*renamings(_MIXTRAL), *halves(config), *stacked_experts(), *per_expert]


def _olmoe_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size = head_dim(file)
    if size * file.whole("attention.head_count") != file.whole("embedding_length"):
        raise file.error(f"its heads have {size} elements, but OLMoE divides the hidden size among them")
    fields = {
        "model_type": "olmoe",
        **common_fields(file),
        "rope_parameters": rope(file, rotated=size),
        "intermediate_size": file.whole("feed_forward_length"),
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "norm_topk_prob": False,  # as llama.cpp computes
        "clip_qkv": file.real("attention.clamp_kqv") if file.has("attention.clamp_kqv") else None,
        "attention_bias": file.any_block_has("attn_q.bias"),
        "hidden_act": "silu",
    }
    file.check({*_OLMOE, *EXPERTS}, biases=ATTENTION)
    return fields


def _granite_config(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    file = File(metadata, shapes)
    size = head_dim(file)
    # llama.cpp takes this key for whether positions are rotated at all.
    file.refuse_unless("rope.scaling.finetuned", (True,), "so its attention knows no positions")
    shared = file.any_block_has("ffn_up_shexp.weight")
    shared_size = {"shared_intermediate_size": file.whole("expert_shared_feed_forward_length")} if shared else {}
    fields = {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **common_fields(file),
        **shared_size,
        "rope_parameters": rope(file, rotated=size),
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
    file.check({*_GRANITE, "attn_q", "attn_k", "ffn_gate_shexp", "ffn_up_shexp", *EXPERTS}, biases=ATTENTION)
    return fields


def _granite_conversions(config: Any) -> list[Any]:
    from transformers.core_model_loading import Concatenate

    shared = computed(
        ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"], "shared_mlp.input_linear.weight", Concatenate(dim=0)
    )
    return [*renamings(_GRANITE), *halves(config), *stacked_experts("block_sparse_moe.experts"), shared]


MIXTRAL = Family(_mixtral_config, _mixtral_conversions)
OLMOE = Family(_olmoe_config, lambda config: [*renamings(_OLMOE), *stacked_experts()])
GRANITE_MOE = Family(_granite_config, _granite_conversions)
