"""Conversions from the names of GGUF files to those of Transformers' models, made of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
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
        *(WeightRenaming(r"\." + name.replace(".", r"\.") + r"\.", f".{module}.") for name, module in blocks.items()),
    ]


def renamed(source: str, target: str) -> Any:
    """Return the conversion of a name in a layer that differs in its end, too: ".weight" or ".bias"."""
    from transformers.core_model_loading import WeightRenaming

    return WeightRenaming(r"\." + source.replace(".", r"\."), f".{target}")


def computed(sources: Sequence[str], target: str, *operations: Any) -> Any:
    """Return a conversion by operations, given names in a layer."""
    from transformers.core_model_loading import WeightConverter

    patterns = [r"\." + source.replace(".", r"\.") for source in sources]
    return WeightConverter(source_patterns=patterns, target_patterns=f".{target}", operations=list(operations))


def stacked_experts(experts: str = "mlp.experts") -> list[Any]:
    """Return the conversions of experts that both the file and the model have stacked, `[E, out, in]`.

    Gate and up are two tensors of the file, or one with gate first, and one parameter.
    """
    from transformers.core_model_loading import Concatenate

    return [
        renamed("ffn_down_exps.weight", f"{experts}.down_proj"),
        renamed("ffn_gate_up_exps.weight", f"{experts}.gate_up_proj"),
        computed(["ffn_gate_exps.weight", "ffn_up_exps.weight"], f"{experts}.gate_up_proj", Concatenate(dim=1)),
    ]


def halves(config: Any, attention: str = "self_attn") -> list[Any]:
    """Return the conversions of queries and keys whose rotated rows are in pairs, as in all files of `llama`."""
    from promoe.model.gguf.families.operations import PairsToHalves

    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    return [
        computed([f"attn_{one}.{kind}"], f"{attention}.{one}_proj.{kind}", PairsToHalves(count))
        for one, count in heads.items()
        for kind in ("weight", "bias")
    ]
