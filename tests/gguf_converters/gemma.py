"""Gemma 4 with experts."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Converter, Tensors


class Gemma4(Converter):
    """`Gemma4Model`."""

    arch = MODEL_ARCH.GEMMA4

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 16,
            "final_logit_softcapping": 30.0,
            "intermediate_size": 2 * intermediate,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": intermediate,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        local, whole = (config.per_layer_config[slides.index(one)] for one in (True, False))
        writer.add_type("model")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv([(local if one else whole).num_key_value_heads for one in slides])
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(slides)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_key_length(whole.head_dim)
        writer.add_value_length(whole.head_dim)
        writer.add_key_length_swa(local.head_dim)
        writer.add_value_length_swa(local.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_rope_dimension_count(whole.head_dim)
        writer.add_rope_dimension_count_swa(local.head_dim)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", tensor
        elif name.endswith("router.per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", tensor
        elif name.endswith("router.proj.weight"):
            yield f"blk.{layer}.ffn_gate_inp.weight", tensor
        elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor

    def unused(self, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Converter.unused`: which part of a head is rotated in full attention."""
        whole = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
        rotated = int(whole * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (whole // 2 - rotated))}
