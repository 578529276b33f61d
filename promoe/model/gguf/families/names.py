"""Conversions from the names of GGUF files to those of Transformers' models, made of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Outside of the layers.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# In a layer, as Llama and most others call them.
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")


def renamings(blocks: Mapping[str, str], outer: Mapping[str, str] = OUTER, layers: str = "model.layers") -> list[Any]:
    """Return the conversions of plain renamings.

    Args:
        blocks: names in a layer, without ".weight", to names of modules in it.
        outer: names outside of layers to names of modules.
        layers: the name of the model's list of layers.
    """
    from transformers.core_model_loading import WeightRenaming

    return [
        *(WeightRenaming(rf"^{name}\.", f"{module}.") for name, module in outer.items()),
        WeightRenaming(r"^blk\.", f"{layers}."),
        *(WeightRenaming(rf"\.{name}\.", f".{module}.") for name, module in blocks.items()),
    ]


def stacked_experts(experts: str = "mlp.experts") -> list[Any]:
    """Return the conversions of experts that both the file and the model have stacked, `[E, out, in]`.

    Gate and up are two tensors of the file, or one with gate first, and one parameter.
    """
    from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

    return [
        WeightRenaming(r"\.ffn_down_exps\.weight", f".{experts}.down_proj"),
        WeightRenaming(r"\.ffn_gate_up_exps\.weight", f".{experts}.gate_up_proj"),
        WeightConverter(
            source_patterns=[r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
            target_patterns=f".{experts}.gate_up_proj",
            operations=[Concatenate(dim=1)],
        ),
    ]
