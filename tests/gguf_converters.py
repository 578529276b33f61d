"""What llama.cpp's converter makes of each family's configuration and weights, written down family by family.

Independent of promoe's tables, which read such files: names come from the `gguf` package, and what is written follows
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType

Tensors = Iterator[tuple[str, torch.Tensor]]


class Converter:
    """How one family is written.

    Attributes:
        arch: of the `gguf` package.
    """

    arch: MODEL_ARCH

    @property
    def architecture(self) -> str:
        """What `general.architecture` says."""
        return MODEL_ARCH_NAMES[self.arch]

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """Fields of the tiny configuration, beside those that all families have."""
        raise NotImplementedError

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """Write what the converter writes for every family."""
        writer.add_type("model")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        if (intermediate := getattr(config, "intermediate_size", None)) is not None:
            writer.add_feed_forward_length(intermediate)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        self.rope(config.rope_parameters, writer)
        if (eps := _first(config, "rms_norm_eps", "norm_eps")) is not None:
            writer.add_layer_norm_rms_eps(eps)
        if (experts := _first(config, "num_local_experts", "num_experts")) is not None:
            writer.add_expert_count(experts)
        writer.add_expert_used_count(_first(config, "num_experts_per_tok", "num_experts_per_token"))
        if (groups := getattr(config, "n_group", None)) is not None:
            writer.add_expert_group_count(groups)
        if (used := getattr(config, "topk_group", None)) is not None:
            writer.add_expert_group_used_count(used)
        if (head_dim := getattr(config, "head_dim", None)) is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)

    def rope(self, rope: dict[str, Any], writer: GGUFWriter) -> None:
        """Write the parameters of rotary embeddings."""
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if (attention_factor := rope.get("attention_factor")) is not None:
                writer.add_rope_scaling_yarn_attn_factor(attention_factor)
            if (fast := rope.get("beta_fast")) is not None:
                writer.add_rope_scaling_yarn_beta_fast(fast)
            if (slow := rope.get("beta_slow")) is not None:
                writer.add_rope_scaling_yarn_beta_slow(slow)
        writer.add_rope_freq_base(rope["rope_theta"])

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """Yield what becomes of a weight, under names that the `gguf` package maps. No arithmetic, only places."""
        head, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj" and head.endswith("experts"):
            half = tensor.shape[1] // 2
            yield f"{head}.gate_proj.weight", tensor[:, :half]
            yield f"{head}.up_proj.weight", tensor[:, half:]
        elif leaf == "down_proj" and head.endswith("experts"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor

    def computed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the converter computes from a tensor."""
        return tensor

    def computed_back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `computed`."""
        return tensor


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


class Qwen3Moe(Converter):
    """qwen3moe."""

    arch = MODEL_ARCH.QWEN3MOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
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
        super().metadata(config, writer)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


# By `model_type` of Transformers.
CONVERTERS: dict[str, Converter] = {
    "qwen3_moe": Qwen3Moe(),
}
