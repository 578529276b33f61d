"""GLM-4.5, gpt-oss and MiniMax-M2."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter

from .base import Converter, Tensors


class Glm4Moe(Converter):
    """`Glm4MoeModel`."""

    arch = MODEL_ARCH.GLM4_MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 2 * intermediate,
            "moe_intermediate_size": intermediate,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }

    def block_count(self, config: Any) -> int:
        """See `Converter.block_count`."""
        return config.num_hidden_layers + config.num_nextn_predict_layers

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(config.num_nextn_predict_layers)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
        else:
            yield from super().tensors(config, name, tensor)

    def unused(self, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Converter.unused`: the layer that predicts a second token."""
        hidden, layer = config.hidden_size, config.num_hidden_layers
        if not config.num_nextn_predict_layers:
            return {}
        last = f"blk.{layer - 1}."
        made = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
        made |= {"nextn.enorm.weight": torch.ones(hidden), "nextn.hnorm.weight": torch.ones(hidden)}
        made["nextn.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
        return {f"blk.{layer}.{name}": tensor for name, tensor in made.items()}


class GptOss(Converter):
    """`GptOssModel`."""

    arch = MODEL_ARCH.GPT_OSS

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": intermediate,
            "head_dim": hidden // 4,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.transpose(-1, -2)
        elif name.endswith("experts.down_proj_bias"):
            yield name.replace("down_proj_bias", "down_proj.bias"), tensor
        elif name.endswith("experts.gate_up_proj_bias"):
            yield name.replace("gate_up_proj_bias", "gate_proj.bias"), tensor[..., ::2]
            yield name.replace("gate_up_proj_bias", "up_proj.bias"), tensor[..., 1::2]
        elif name.endswith("experts.gate_up_proj"):
            rows = tensor.transpose(-1, -2)
            yield name.replace("gate_up_proj", "gate_proj.weight"), rows[:, ::2, :]
            yield name.replace("gate_up_proj", "up_proj.weight"), rows[:, 1::2, :]
        else:
            yield from super().tensors(config, name, tensor)


class MiniMaxM2(Converter):
    """`MiniMaxM2Model`."""

    arch = MODEL_ARCH.MINIMAXM2

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": intermediate,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("e_score_correction_bias"):
            layer = name.removeprefix("model.layers.").partition(".")[0]
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        else:
            yield from super().tensors(config, name, tensor)
