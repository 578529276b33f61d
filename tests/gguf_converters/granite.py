"""Granite, and the hybrid of it with Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Tensors
from .llama import Llama


class Granite(Llama):
    """`GraniteMoeModel`, with or without an expert that all tokens share."""

    arch = MODEL_ARCH.GRANITE_MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        shared = {"shared_intermediate_size": 2 * intermediate} if self.model_type == "granitemoeshared" else {}
        return {
            **shared,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": intermediate,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        if self.model_type == "granitemoeshared":
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith("block_sparse_moe.experts.gate_up_proj"):  # input_linear.weight in checkpoints
            gate, up = tensor.split(config.intermediate_size, dim=-2)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif name.endswith("block_sparse_moe.experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif name.endswith("block_sparse_moe.router.weight"):
            yield f"blk.{layer}.ffn_gate_inp.weight", tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.split(config.shared_intermediate_size, dim=-2)
            yield f"blk.{layer}.ffn_gate_shexp.weight", gate
            yield f"blk.{layer}.ffn_up_shexp.weight", up
        else:
            yield from super().tensors(config, name, tensor)


class GraniteHybrid(Granite):
    """`GraniteHybridModel`, with attention in one layer of four."""

    arch = MODEL_ARCH.GRANITE_HYBRID

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            **super().fields(hidden, intermediate),
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "nope",
            "max_position_embeddings": 2**20,
            "shared_intermediate_size": 2 * intermediate,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 32,
            "mamba_d_head": hidden // 4,
            "mamba_expand": 2,
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.kv_data[0].pop(f"{self.architecture}.attention.head_count_kv")
        counts = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_head_count_kv(counts)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        layer, _, leaf = name.removeprefix("model.layers.").partition(".mamba.")
        if not leaf:
            yield from super().tensors(config, name, tensor)
        elif leaf == "dt_bias":
            yield f"blk.{layer}.ssm_dt.bias", tensor
        elif leaf in ("A_log", "D"):
            yield f"blk.{layer}.ssm_{leaf[0].lower()}", tensor.reshape(*tensor.shape, 1)
        elif leaf == "norm.weight":
            yield f"blk.{layer}.ssm_norm.weight", tensor.reshape(config.mamba_n_groups, -1)
        elif leaf == "conv1d.weight":
            yield f"blk.{layer}.ssm_conv1d.weight", tensor.squeeze()
        else:
            yield f"blk.{layer}.ssm_{leaf.replace('_proj', '')}", tensor

    def computed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed`."""
        return -torch.exp(tensor) if name.endswith("ssm_a") else tensor

    def computed_back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed_back`."""
        return torch.log(-tensor) if name.endswith("ssm_a") else tensor
