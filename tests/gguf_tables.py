"""The tables of GGUF architectures alone: a model from a file without promoe's own reading of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf_checkpoints import read_gguf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from promoe.model.gguf.families import FAMILIES
from promoe.stores.encodings.base import EncodedTensor, StoredTensor
from promoe.stores.safetensors_header import TensorRange


def metadata_of(path: Path) -> dict[str, Any]:
    """The key-value pairs of a file, read by the `gguf` package."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def config_by_tables(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """The configuration that the tables give."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fields = FAMILIES[metadata["general.architecture"]].config(metadata, shapes)
    return AutoConfig.for_model(**fields)


def model_by_tables(path: Path, **rope: Any) -> PreTrainedModel:
    """A file's model in fp32, with further parameters of rotary embeddings.

    Fails if a parameter is missing or has another shape; parameters begin as NaN.
    """
    metadata, tensors = metadata_of(path), read_gguf(path)
    config = config_by_tables(metadata, tensors)
    if rope:
        config.rope_parameters.update(rope)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    family = FAMILIES[metadata["general.architecture"]]
    conversions = family.conversions(config)
    ranges = {name: TensorRange(name, 0, 0, one.nbytes, tuple(one.shape), "F32") for name, one in tensors.items()}
    weights = family.weights(metadata, ranges)
    state_dict = {name: _decoded(weight, tensors[name]) for name, weight in weights.items()}
    wanted = LoadStateDictConfig(dtype=torch.float32, weight_mapping=conversions)
    loading, _ = convert_and_load_state_dict_in_model(model, state_dict, wanted)
    missing = loading.missing_keys - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert not missing, missing
    assert not loading.mismatched_keys, loading.mismatched_keys
    assert not loading.conversion_errors, loading.conversion_errors
    assert not loading.unexpected_keys, loading.unexpected_keys
    model.tie_weights()
    return model


def _decoded(found: StoredTensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(found, EncodedTensor):
        out = torch.empty_like(tensor)
        found.encoding.decode([tensor], out)
        return out
    return tensor
