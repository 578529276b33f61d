"""Qwen2MoE and Qwen3MoE."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Converter, Tensors


class Qwen2Moe(Converter):
    """`Qwen2MoeModel`."""

    arch = MODEL_ARCH.QWEN2MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 3 * intermediate,
            "moe_intermediate_size": intermediate,
            "shared_expert_intermediate_size": 2 * intermediate,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`. The converter squeezes all tensors."""
        if name.endswith("shared_expert_gate.weight"):
            yield name, tensor.squeeze()
        else:
            yield from super().tensors(config, name, tensor)


class Qwen3Moe(Converter):
    """`Qwen3MoeModel`."""

    arch = MODEL_ARCH.QWEN3MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 2 * intermediate,
            "moe_intermediate_size": intermediate,
            "head_dim": hidden // 4,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


class Qwen3VlMoe(Qwen3Moe):
    """`Qwen3VLMoeTextModel`: the language model of Qwen3-VL, here written from a Qwen3MoE, which computes the same."""

    arch = MODEL_ARCH.QWEN3VLMOE

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_rope_dimension_sections([3, 3, 2, 0])
        writer.add_num_deepstack_layers(3)
