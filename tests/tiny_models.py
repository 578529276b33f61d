"""Tiny random models of every tested family. Seeded; spread enough that routing varies and logits are far apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
VOCAB_SIZE = 128


def build(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "grouped_mm",
    hidden: int = 64,
    intermediate: int = 32,
    num_experts: int = 8,
    top_k: int = 2,
    layers: int = 3,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A causal language model of `family`, in eval mode, on the CPU.

    Args:
        family: one of MOE_FAMILIES, or a dense family ("llama").
        dtype: of all parameters and buffers.
        experts_implementation: "eager", "batched_mm" or "grouped_mm"; ignored for a dense family.
        hidden: hidden size H, a multiple of 32.
        intermediate: intermediate size I of one expert (of the whole MLP in a dense model).
        num_experts: routed experts E, a multiple of 4.
        top_k: experts per token K.
        layers: decoder layers. The first is dense in deepseek_v2 and deepseek_v3, so these have one MoE layer less.
        seed: of the weights.
        overrides: further fields of the family's config.
    """
    config = make_config(
        family,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        layers=layers,
        **overrides,
    )
    model = AutoModelForCausalLM.from_config(config)
    spread_weights(model, seed)
    model = model.to(dtype).eval()
    if family in MOE_FAMILIES:
        model.set_experts_implementation(experts_implementation)
    return model


def make_config(
    family: str, *, hidden: int, intermediate: int, num_experts: int, top_k: int, layers: int, **overrides: Any
) -> Any:
    """The config that `build` uses."""
    heads = 4
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if family in MOE_FAMILIES:
        fields |= {"num_experts_per_tok": top_k, **_experts_fields(family, hidden, intermediate, num_experts)}
    return AutoConfig.for_model(family, **(fields | overrides))


def _experts_fields(family: str, hidden: int, intermediate: int, num_experts: int) -> dict[str, Any]:
    head_dim = hidden // 4
    latent = {
        "moe_intermediate_size": intermediate,
        "intermediate_size": 2 * intermediate,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    by_family: dict[str, dict[str, Any]] = {
        "qwen2_moe": {
            "num_experts": num_experts,
            "moe_intermediate_size": intermediate,
            "shared_expert_intermediate_size": 2 * intermediate,
            "decoder_sparse_step": 1,
        },
        "qwen3_moe": {
            "num_experts": num_experts,
            "moe_intermediate_size": intermediate,
            "head_dim": head_dim,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        "mixtral": {"num_local_experts": num_experts},
        "olmoe": {"num_experts": num_experts},
        "deepseek_v2": {**latent, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        "deepseek_v3": {**latent, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "gpt_oss": {
            "num_local_experts": num_experts,
            "head_dim": head_dim,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    return by_family[family]


@torch.no_grad()
def spread_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with random weights that keep activations near one, gates decided and logits apart."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * values if is_norm else 0.2 * values)
        elif parameter.ndim == 2 and name.endswith("_bias"):  # biases of stacked experts
            parameter.copy_(0.2 * values)
        elif "embed" in name:
            parameter.copy_(values)
        else:
            # [E, in, out] in gpt_oss, [..., out, in] elsewhere.
            transposed = parameter.ndim == 3 and getattr(_owner(model, name), "is_transposed", False)
            fan_in = parameter.shape[-2 if transposed else -1]
            gain = 2.0 if name.endswith(("gate.weight", "router.weight", "lm_head.weight")) else 1.0
            parameter.copy_(gain * values / fan_in**0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _owner(model: nn.Module, parameter_name: str) -> nn.Module:
    return model.get_submodule(parameter_name.rpartition(".")[0])


def token_ids(batch: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random ids `[batch, length]` without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (batch, length), generator=generator)


def left_padded(lengths: tuple[int, ...] = (12, 7, 3), seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with left padding: `input_ids` and `attention_mask`, both `[len(lengths), max(lengths)]`."""
    longest = max(lengths)
    ids = token_ids(len(lengths), longest, seed)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}
