"""Mixtral and OLMoE."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter

from .base import Converter, Tensors


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """`LlamaModel.permute`."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


class Llama(Converter):
    """`LlamaModel`."""

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        writer.add_vocab_size(config.vocab_size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(head_dim)

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            yield name, permute(tensor, config.num_attention_heads)
        elif name.endswith(("k_proj.weight", "k_proj.bias")):
            yield name, permute(tensor, config.num_key_value_heads)
        else:
            yield from super().tensors(config, name, tensor)


class Mixtral(Llama):
    """`LlamaModel`, for Mixtral."""

    arch = MODEL_ARCH.LLAMA

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": intermediate,
            "head_dim": hidden // 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }


class OldMixtral(Mixtral):
    """The converter of December 2023, which wrote one tensor per expert."""

    def tensors(self, config: Any, name: str, tensor: torch.Tensor) -> Tensors:
        """See `Converter.tensors`."""
        for one, value in super().tensors(config, name, tensor):
            layer, _, leaf = one.removeprefix("model.layers.").partition(".mlp.experts.")
            if leaf:
                kind = leaf.removesuffix("_proj.weight")
                yield from ((f"blk.{layer}.ffn_{kind}.{idx}.weight", expert) for idx, expert in enumerate(value))
            else:
                yield one, value


class Olmoe(Converter):
    """`OlmoeModel`."""

    arch = MODEL_ARCH.OLMOE

    def fields(self, hidden: int, intermediate: int) -> dict[str, Any]:
        """See `Converter.fields`."""
        return {
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": intermediate,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def metadata(self, config: Any, writer: GGUFWriter) -> None:
        """See `Converter.metadata`."""
        super().metadata(config, writer)
        if config.clip_qkv is not None:
            writer.add_clamp_kqv(config.clip_qkv)
