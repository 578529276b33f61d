"""What llama.cpp's converter makes of any family's configuration and weights."""

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
        model_type: of Transformers.
    """

    arch: MODEL_ARCH
    model_type: str

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def block_count(self, config: Any) -> int:
        """Return how many layers the file has."""
        return config.num_hidden_layers

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
        writer.add_block_count(self.block_count(config))
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        if (intermediate := getattr(config, "intermediate_size", None)) is not None:
            writer.add_feed_forward_length(intermediate)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        self.rope(config.rope_parameters, writer)
        if (eps := first(config, "rms_norm_eps", "norm_eps")) is not None:
            writer.add_layer_norm_rms_eps(eps)
        writer.add_expert_count(first(config, "num_local_experts", "num_experts", "n_routed_experts"))
        writer.add_expert_used_count(first(config, "num_experts_per_tok", "num_experts_per_token"))
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
        """Yield what becomes of a weight, under names of the file or such that the `gguf` package maps.

        No arithmetic: elements only change places.
        """
        head, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj" and head.endswith("experts"):
            half = tensor.shape[1] // 2
            yield f"{head}.gate_proj.weight", tensor[:, :half]
            yield f"{head}.up_proj.weight", tensor[:, half:]
        elif leaf == "down_proj" and head.endswith("experts"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor

    def unused(self, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors that are in the file beside `tensors`, and that no parameter of the model comes from."""
        return {}

    def computed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the converter computes from a tensor."""
        return tensor

    def computed_back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `computed`."""
        return tensor


def first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
