"""Nemotron 3."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Converter, Tensors
from .llama import permute


class NemotronH(Converter):
    """`NemotronHModel`, with experts."""

    arch = MODEL_ARCH.NEMOTRON_H_MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "intermediate_size": intermediate,
            "moe_intermediate_size": intermediate,
            "moe_shared_expert_intermediate_size": 2 * intermediate,
            "routed_scaling_factor": 2.5,
            "head_dim": 32,
            "max_position_embeddings": 2**20,
            "mamba_num_heads": 8,
            "mamba_head_dim": hidden // 4,
            "n_groups": 2,
            "ssm_state_size": 32,
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`. Of what is for every family, positions are left out."""
        counts = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layers_block_type]
        sizes = [config.moe_intermediate_size if kind == "moe" else 0 for kind in config.layers_block_type]
        writer.add_type("model")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(2**20)
        writer.add_embedding_length(config.hidden_size)
        writer.add_vocab_size(config.vocab_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(counts)
        writer.add_feed_forward_length(sizes)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_scaling_finetuned(False)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        layer, _, leaf = name.removeprefix("model.layers.").partition(".mixer.")
        if leaf == "dt_bias":
            yield f"blk.{layer}.ssm_dt.bias", tensor
        elif leaf in ("A_log", "D"):
            yield f"blk.{layer}.ssm_{leaf[0].lower()}", tensor.squeeze().reshape(-1, 1)
        elif leaf == "norm.weight":
            yield f"blk.{layer}.ssm_norm.weight", tensor.reshape(config.n_groups, -1)
        elif leaf == "conv1d.weight":
            yield f"blk.{layer}.ssm_conv1d.weight", tensor.squeeze()
        elif leaf == "gate.e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        elif leaf in ("experts.up_proj", "experts.down_proj"):
            yield f"blk.{layer}.ffn_{leaf[8:].removesuffix('_proj')}_exps.weight", tensor
        elif leaf in ("q_proj.weight", "k_proj.weight"):
            heads = config.num_attention_heads if leaf[0] == "q" else config.num_key_value_heads
            yield f"blk.{layer}.attn_{leaf[0]}.weight", permute(tensor, heads)
        else:
            yield name.replace("model.", "backbone."), tensor

    def computed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed`."""
        return -torch.exp(tensor) if name.endswith("ssm_a") else tensor

    def computed_back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed_back`."""
        return torch.log(-tensor) if name.endswith("ssm_a") else tensor
