"""Models of Llama's form with experts: Mixtral and OLMoE."""

from __future__ import annotations

import re
from typing import Any

from .base import Family
from .fields import common_fields, head_dim, rope
from .file import File, Metadata, Shapes
from .names import ATTENTION, EXPERTS, HEAD_NORMS, NORMS, halves, renamings, stacked_experts

_MIXTRAL = {**NORMS, "attn_v": ATTENTION["attn_v"], "attn_output": ATTENTION["attn_output"], "ffn_gate_inp": "mlp.gate"}
_OLMOE = {**NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}


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


MIXTRAL = Family(_mixtral_config, _mixtral_conversions)
OLMOE = Family(_olmoe_config, lambda config: [*renamings(_OLMOE), *stacked_experts()])
