"""dots.llm1, ERNIE 4.5, Hunyuan-A13B and LFM2."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter

from .base import Converter, Tensors


class Dots1(Converter):
    """`Dots1Model`."""

    arch = MODEL_ARCH.DOTS1

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "intermediate_size": 2 * intermediate,
            "moe_intermediate_size": intermediate,
            "head_dim": hidden // 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
        else:
            yield from super().tensors(config, name, tensor)


class Ernie45Moe(Converter):
    """`Ernie4_5MoeModel`."""

    arch = MODEL_ARCH.ERNIE4_5_MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "intermediate_size": 4 * intermediate,
            "moe_intermediate_size": intermediate,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        if config.moe_num_shared_experts:
            writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith("e_score_correction_bias"):
            layer = name.removeprefix("model.layers.").partition(".")[0]
            yield f"blk.{layer}.exp_probs_b.bias", tensor.squeeze()
        else:
            yield from super().tensors(config, name, tensor)


class HunyuanMoe(Converter):
    """`HunYuanMoEModel`."""

    arch = MODEL_ARCH.HUNYUAN_MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_experts": 8,
            "moe_topk": 2,
            "intermediate_size": intermediate,
            "head_dim": hidden // 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)


class Lfm2Moe(Converter):
    """`LFM2MoeModel`."""

    arch = MODEL_ARCH.LFM2MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "intermediate_size": 2 * intermediate,
            "moe_intermediate_size": intermediate,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.kv_data[0].pop(f"{self.architecture}.attention.head_count_kv")
        counts = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_head_count_kv(counts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_vocab_size(config.vocab_size)
        writer.add_shortconv_l_cache(config.conv_L_cache)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith(".expert_bias"):
            yield f"{name}.bias", tensor
        elif "conv.conv" in name:
            yield name, tensor.squeeze(1)
        elif name.endswith("experts.gate_up_proj"):  # w1 and w3 of single experts in checkpoints
            gate, up = tensor.chunk(2, 1)
            stem = name.removeprefix("model.").removesuffix("gate_up_proj")
            yield f"{stem}w1.weight", gate
            yield f"{stem}w3.weight", up
        elif name.endswith("experts.down_proj"):
            yield name.removeprefix("model.").replace("down_proj", "w2.weight"), tensor
        else:
            yield from super().tensors(config, name, tensor)
