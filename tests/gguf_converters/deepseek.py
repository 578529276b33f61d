"""DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter

from .base import Converter, Tensors


class DeepSeek(Converter):
    """`DeepseekV2Model`, since May 2025: queries and keys in the compressed form."""

    arch = MODEL_ARCH.DEEPSEEK2

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        is_v2 = self.model_type == "deepseek_v2"
        return {
            **({} if is_v2 else {"num_nextn_predict_layers": 0}),
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 1 if is_v2 else 4,
            "topk_group": 1 if is_v2 else 2,
            "intermediate_size": 2 * intermediate,
            "moe_intermediate_size": intermediate,
            "kv_lora_rank": hidden // 2,
            "q_lora_rank": hidden,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": hidden // 4,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": not is_v2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        self.heads(config, writer)
        writer.add_vocab_size(config.vocab_size)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        if self.model_type == "deepseek_v3":
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        if (mscale := config.rope_parameters.get("mscale_all_dim")) is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)

    def heads(self, config: Any, writer: GGUFWriter) -> None:
        """Write the sizes of heads."""
        _set(writer, "attention.head_count_kv", 1)
        _set(writer, "attention.key_length", config.kv_lora_rank + config.qk_rope_head_dim)
        _set(writer, "attention.value_length", config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
        elif name.endswith("kv_b_proj.weight"):
            kv_b = tensor.view(config.num_key_value_heads, -1, tensor.shape[-1])
            k_b, v_b = torch.split(kv_b, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), k_b.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), v_b
        else:
            yield from super().tensors(config, name, tensor)


class OldDeepSeek(DeepSeek):
    """The converter of 2024: keys and values in one projection; no groups of experts."""

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        for key in ("expert_group_count", "expert_group_used_count"):
            writer.kv_data[0].pop(f"{self.architecture}.{key}")

    def heads(self, config: Any, writer: GGUFWriter) -> None:
        """See `DeepSeek.heads`."""
        _set(writer, "attention.key_length", config.qk_nope_head_dim + config.qk_rope_head_dim)
        _set(writer, "attention.value_length", config.v_head_dim)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("kv_b_proj.weight"):
            yield name, tensor
        else:
            yield from super().tensors(config, name, tensor)


class FusedDeepSeek(DeepSeek):
    """A converter of 2026, told to write gate and up of the experts as one tensor."""

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("experts.gate_up_proj"):
            yield f"blk.{name.removeprefix('model.layers.').partition('.')[0]}.ffn_gate_up_exps.weight", tensor
        else:
            yield from super().tensors(config, name, tensor)


def _set(writer: GGUFWriter, key: str, value: int) -> None:
    """Write a number over one that is there."""
    writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
    writer.add_uint32(f"{writer.arch}.{key}", value)
