"""Qwen3-Next and Qwen3.5-MoE."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Converter, Tensors


class Qwen3Next(Converter):
    """`Qwen3NextModel`."""

    arch = MODEL_ARCH.QWEN3NEXT

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`. One layer of four has full attention."""
        return {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 3 * intermediate,
            "moe_intermediate_size": intermediate,
            "shared_expert_intermediate_size": 2 * intermediate,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith("in_proj_qkvz.weight"):
            per_key = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
            sizes = [config.linear_key_head_dim] * 2 + [per_key] * 2
            by_head = tensor.permute(1, 0).contiguous().view(-1, config.linear_num_key_heads, sum(sizes))
            q, k, v, z = (one.contiguous().view(config.hidden_size, -1) for one in torch.split(by_head, sizes, dim=-1))
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([q, k, v], dim=-1).permute(1, 0)
            yield f"blk.{layer}.attn_gate.weight", z.permute(1, 0)
        elif name.endswith(".dt_bias"):
            yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
        elif "conv1d" in name or "shared_expert_gate" in name:
            yield name, tensor.squeeze()
        else:
            yield from super().tensors(config, name, tensor)

    def computed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed`."""
        if name.endswith("ssm_a"):
            return -torch.exp(tensor)
        return tensor + 1 if self._is_offset(name) else tensor

    def computed_back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `Converter.computed_back`."""
        if name.endswith("ssm_a"):
            return torch.log(-tensor)
        return tensor - 1 if self._is_offset(name) else tensor

    def _is_offset(self, name: str) -> bool:
        return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


class FirstQwen3Next(Qwen3Next):
    """A converter before December 2025, which wrote the projection of linear attention as it is."""

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("in_proj_qkvz.weight"):
            yield f"blk.{name.removeprefix('model.layers.').partition('.')[0]}.ssm_in.weight", tensor
        else:
            yield from super().tensors(config, name, tensor)


class Qwen35Moe(Qwen3Next):
    """`Qwen3_5MoeTextModel`."""

    arch = MODEL_ARCH.QWEN35MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        fields = {
            name: value for name, value in super().fields(hidden, intermediate).items() if name != "intermediate_size"
        }
        rope = fields["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        return {**fields, "rope_parameters": rope, "linear_num_value_heads": 6}

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        size, before = config.linear_value_head_dim, 2 * config.linear_key_head_dim * keys

        def tiled(heads: torch.Tensor, dim: int, head_dim: int) -> torch.Tensor:
            shape = list(heads.shape)
            new_shape = [*shape[:dim], keys, values // keys, head_dim, *shape[dim + 1 :]]
            return heads.reshape(*new_shape).transpose(dim, dim + 1).contiguous().reshape(*shape)

        if ".in_proj_qkv." in name:
            tensor = torch.cat([tensor[:before], tiled(tensor[before:], 0, size)])
        elif ".in_proj_z." in name:
            tensor = tiled(tensor, 0, size)
        elif any(one in name for one in (".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
            tensor = tiled(tensor, 0, 1)
        elif ".conv1d" in name:
            kernel = tensor.squeeze()
            tensor = torch.cat([kernel[:before], tiled(kernel[before:], 0, size)])
        elif ".out_proj." in name:
            tensor = tiled(tensor, 1, size)
        yield from super().tensors(config, name, tensor)
