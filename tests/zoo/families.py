"""A tiny random model of every MoE family of the installed Transformers, by one table of sizes and some exceptions.

A family is a folder of `transformers/models` that has classes of routed experts. Its tiny model comes from the family's
own (text) configuration with every size that it has in common with `SIZES` made small; what a family wants otherwise is
in `FAMILIES`, and nothing else is listed anywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from tiny_models import spread_weights
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from zoo.scan import experts_classes

TOP_K = 3
NUM_EXPERTS = 8
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "share_expert_dim"), 32),
    "moe_hidden_size": 48,
    "moe_latent_size": 48,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 4),
    "num_layers": 2,
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_sliding_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "model_max_length"), 256),
    "rel_extent": 64,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), TOP_K),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("num_dense_layers", "first_k_dense_replace"), 1),
    "zero_expert_num": 2,
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "index_topk": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "o_groups": 2,
    "sliding_window": 16,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "mamba_dt_rank"), 16),
    "n_groups": 2,
    **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 1),
}
# Lists with one entry per layer: which of their entries the four layers take. Dense layers come first and are alike.
PER_LAYER = {
    **dict.fromkeys(("layer_types", "layer_rope_theta", "no_rope_layers", "indexer_types"), (0, 1, 2, -1)),
    "mlp_layer_types": (0, -1, -1, -1),
}

# Of the encoders of images and sounds, in models that have some beside their language model.
ENCODER_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "embed_dim", "d_model", "intermediate_size", "encoder_ffn_dim", "projector_input_dim"), 32
    ),
    **dict.fromkeys(("out_hidden_size", "output_dim", "vision_output_dim", "projector_output_dim"), 64),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 4),
    "head_dim": 8,
    "image_size": 32,
}


@dataclass(frozen=True)
class Family:
    """How a family's tiny model differs from the table.

    Attributes:
        model_type: of the configuration; by default the family's text configuration, or its only one.
        model_class: by default the family's causal or sequence-to-sequence model, or the one text model.
        fields: of the configuration, over the table; `_DEFAULT`: the configuration's own.
        whole: the family's language model inside a model that also takes images or sounds.
        takes_embeddings: the model is not called with token ids.
        generates: whether the unmodified model can, given token ids only.
        runs_in_bf16: whether the unmodified model does.
        forecasts: whether its gates can say early what they will choose.
        since: the version of Transformers whose form of it is served.
        note: what a reader should know of it.
    """

    model_type: str | None = None
    model_class: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    takes_embeddings: bool = False
    generates: bool = True
    runs_in_bf16: bool = True
    forecasts: bool = True
    since: str = "5.17"
    note: str = ""


_DEFAULT = object()
_LINEAR_THEN_FULL = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
FAMILIES: dict[str, Family] = {
    "aria": Family(since="5.18", note="from Transformers 5.18 on"),
    "dbrx": Family(
        note="flat parameters hold the matrices one below the other",
        fields={
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 32,
                "moe_num_experts": NUM_EXPERTS,
                "moe_top_k": TOP_K,
            },
        },
    ),
    "deepseek_ocr2": Family(
        model_class="DeepseekOcr2TextModel", fields={"mlp_layer_types": ["dense"] + 3 * ["sparse"]}
    ),
    "dots3_note": Family(fields={"per_layer_config": {}, "layer_types": ["indexed_attention"] * 4}),
    "gemma4": Family(fields={"enable_moe_block": True, "hidden_size_per_layer_input": 16, "per_layer_config": {}}),
    "diffusion_gemma": Family(model_class="DiffusionGemmaEncoderTextModel", fields={"per_layer_config": {}}),
    "ernie4_5_vl_moe": Family(
        model_class="Ernie4_5_VLMoeTextModel",
        fields={
            "moe_intermediate_size": [32, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
    ),
    "glm4v_moe": Family(
        fields={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        }
    ),
    "glm5_next": Family(
        fields={
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        }
    ),
    "granitemoehybrid": Family(fields={"layer_types": _LINEAR_THEN_FULL, "mamba_n_heads": 8}),
    "inkling2": Family(runs_in_bf16=False, note="the unmodified model does not run in bf16 as a whole"),
    "jetmoe": Family(
        forecasts=False,
        note="promoe serves four projections per decoder layer, two of them in the attention; two share a gate",
    ),
    "llama4": Family(note="promoe skips experts without a token; the unmodified layer multiplies zeros by them"),
    "longcat_flash": Family(note="identity experts need no weights"),
    "nllb_moe": Family(note="one module per expert; Transformers uses only two experts of a layer"),
    "jamba": Family(fields={"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": Family(fields={"layer_types": _LINEAR_THEN_FULL}),
    "lfm2_moe": Family(fields={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "mistral4": Family(model_class="Mistral4ForCausalLM", fields={"head_dim": _DEFAULT}),
    "nemotron_h": Family(fields={"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}),
    "qwen3_omni_moe": Family(model_type="qwen3_omni_moe_text", model_class="Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe talker": Family(
        model_type="qwen3_omni_moe_talker_text",
        model_class="Qwen3OmniMoeTalkerModel",
        fields={"shared_expert_intermediate_size": 32},
        takes_embeddings=True,
    ),
    "qwen4_exp": Family(
        fields={
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
    ),
    "switch_transformers": Family(fields={"num_decoder_layers": 2}, note="one module per expert"),
    "step3p7": Family(model_type="step3p5", model_class="Step3p7TextModel"),
    "unlimited_ocr": Family(model_class="UnlimitedOcrTextModel"),
    "zaya": Family(fields={"num_experts_per_tok": 1}),
    "ernie4_5_vl_moe whole": Family("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", whole=True),
    "gemma4 whole": Family("gemma4", "Gemma4ForConditionalGeneration", whole=True),
    "glm4v_moe whole": Family("glm4v_moe", "Glm4vMoeForConditionalGeneration", whole=True),
    "glm5_next whole": Family("glm5_next", "Glm5NextForConditionalGeneration", whole=True),
    "llama4 whole": Family("llama4", "Llama4ForConditionalGeneration", whole=True),
    "minimax_m3_vl whole": Family("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", whole=True),
    "qwen3_5_moe whole": Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", whole=True),
    "qwen3_omni_moe whole": Family(
        "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", whole=True, generates=False
    ),
    "qwen3_vl_moe whole": Family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", whole=True),
    "qwen4_exp whole": Family("qwen4_exp", "Qwen4ExpForConditionalGeneration", whole=True),
    "step3p7 whole": Family("step3p7", "Step3p7ForConditionalGeneration", whole=True),
}


def family_of(name: str) -> Family:
    """What is special about a tiny model."""
    return FAMILIES.get(name, Family())


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny random model, in eval mode, on the CPU. `name` is one of `names()`."""
    entry, family = family_of(name), name.split()[0]
    config = make_config(family, entry)
    model = model_class(family, entry, config)._from_config(config, dtype=dtype)
    spread_weights(model, seed)
    return model.eval()


def make_config(family: str, entry: Family) -> Any:
    """The tiny configuration of a family."""
    return _whole_config(family, entry) if entry.whole else _language_config(family, entry)


def _whole_config(family: str, entry: Family) -> Any:
    """A language model's configuration, and those of its encoders."""
    config_class = CONFIG_MAPPING[entry.model_type]
    parts = {}
    for name, part_class in config_class.sub_configs.items():
        if name == "text_config":
            parts[name] = _language_config(family, family_of(family)).to_dict()
        else:
            # `AutoConfig`: any encoder's configuration may be there. The one that is there by default.
            part = getattr(config_class(), name) if part_class is AutoConfig else part_class()
            defaults = part.to_dict()
            parts[name] = {key: size for key, size in ENCODER_SIZES.items() if isinstance(defaults.get(key), int)}
    return config_class(**parts)


def _language_config(family: str, entry: Family) -> Any:
    config_class = CONFIG_MAPPING[entry.model_type or _model_type(family)]
    defaults = config_class().to_dict()
    fields = {name: size for name, size in SIZES.items() if name in defaults}
    if "kv_lora_rank" in defaults:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name, entries in PER_LAYER.items():
        if isinstance(defaults.get(name), list):
            fields[name] = [defaults[name][entry] for entry in entries]
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, **entry.fields}
    return config_class(**{name: value for name, value in fields.items() if value is not _DEFAULT})


def model_class(family: str, entry: Family, config: Any) -> type[PreTrainedModel]:
    """The class to build: named, or the family's language model, or the model class of its text configuration."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if entry.model_class is not None:
        found: type[PreTrainedModel] = getattr(module, entry.model_class)
        return found
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    candidates = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, PreTrainedModel)
        and one.config_class is type(config)
        and one.__name__.endswith("Model")
        and "PreTrained" not in one.__name__
    ]
    assert len(candidates) == 1, f"{family}: which of {candidates}? Say so in FAMILIES."
    return candidates[0]


def _model_type(family: str) -> str:
    types = [name for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == family]
    return next((name for name in types if name.endswith("_text")), types[0])


def names() -> list[str]:
    """Every family that the installed Transformers has, and second models of some ("family which")."""
    families = served_families()
    return [*families, *(name for name in FAMILIES if " " in name and name.split()[0] in families)]


def served_families() -> list[str]:
    """Those whose form in the installed version is served."""
    return [family for family in experts_classes() if not came_later(family)]


def came_later(family: str) -> bool:
    """Whether the installed version has a family in a form that later ones gave up."""
    return Version(transformers.__version__).release < Version(family_of(family).since).release


def inputs(
    name: str, model: PreTrainedModel, batch: int = 2, length: int = 4, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tokens for a forward of any of these models."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 100, (batch, length), generator=generator)
    if family_of(name).takes_embeddings:
        embeddings = torch.randn(batch, length, model.config.hidden_size, generator=generator)
        return {"inputs_embeds": embeddings.to(model.dtype)}
    return (
        {"input_ids": ids, "decoder_input_ids": ids[:, :3]} if model.config.is_encoder_decoder else {"input_ids": ids}
    )
