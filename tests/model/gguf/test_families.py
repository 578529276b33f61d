"""Every architecture of GGUF files in promoe's tables: configuration, weights and logits.

The files are written by `gguf_checkpoints`, which follows llama.cpp's converter and knows nothing of the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_checkpoints import CONVERTERS, dequantised_model, tiny_model, write_gguf
from gguf_tables import model_by_tables
from tiny_models import token_ids
from transformers import AutoModelForCausalLM, PreTrainedModel

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in CONVERTERS},
    "qwen3_moe tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe yarn": ("qwen3_moe", {"rope_parameters": _YARN}),
    "qwen3_moe linear": ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "glm4_moe air": ("glm4_moe", {"use_qk_norm": False, "num_nextn_predict_layers": 0}),
    "glm4_moe dense": ("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    "gpt_oss no yarn": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    # llama.cpp takes models of 27 layers for the small V2, which has no compressed queries.
    "deepseek_v2 lite": ("deepseek_v2", {"num_hidden_layers": 27, "q_lora_rank": None}),
    "deepseek_v2 old lite": ("deepseek_v2 old", {"num_hidden_layers": 27, "q_lora_rank": None}),
    "deepseek_v2 groups": ("deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v3 no groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "granitemoehybrid rope": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "gemma4 values": ("gemma4", {"attention_k_eq_v": False, "num_global_key_value_heads": 2}),
    "nemotron_h latent": ("nemotron_h", {"moe_latent_size": 32}),
    "olmoe clipped": ("olmoe", {"clip_qkv": 0.5}),
}
# What llama.cpp computes otherwise than the model's authors and Transformers, or does not read any more.
NOT_IN_LLAMA_CPP = {
    "mixtral old": "it reads no tensors of single experts any more",
    "olmoe clipped": "it does not clip",
    "deepseek_v2 groups": "it takes groups for those of V3, which are chosen by other scores",
}
# It looks GELU up in a table of 16 bits.
TOLERANCE = {"gemma4": 0.02, "gemma4 values": 0.02}
# Where it differs in a detail: the field with which Transformers computes the same.
AS_IN_LLAMA_CPP = {"gpt_oss": {"truncate": True}}  # it rounds the borders of yarn, which gpt-oss's authors do not
every_case = pytest.mark.parametrize("case", CASES)
# Of a configuration, beside what the file says: names, and how Transformers is to run the model.
NOT_COMPARED = {"architectures", "dtype", "_name_or_path", "transformers_version", "initializer_range"}


@every_case
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0"])
def test_weights_are_those_that_were_written(tmp_path: Path, case: str, weight_type: str) -> None:
    family, fields = CASES[case]
    path = write_gguf(tmp_path, family, weight_type=weight_type, **fields)
    found = model_by_tables(path)
    expected = dequantised_model(path, family, torch.float32, **fields)
    assert_same_weights(found, expected)
    assert torch.equal(logits(found), logits(expected))


@every_case
def test_the_configuration_is_that_which_was_written(tmp_path: Path, case: str) -> None:
    family, fields = CASES[case]
    found = model_by_tables(write_gguf(tmp_path, family, **fields)).config.to_dict()
    expected = tiny_model(family, **fields).config.to_dict()
    for name in NOT_COMPARED:
        found.pop(name, None), expected.pop(name, None)
    assert found == expected


@every_case
def test_llama_cpp_reads_the_same_model_from_the_file(tmp_path: Path, case: str) -> None:
    """Checks the files of these tests by the program that such files are made for."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if case in NOT_IN_LLAMA_CPP:
        pytest.skip(NOT_IN_LLAMA_CPP[case])
    family, fields = CASES[case]
    path = write_gguf(tmp_path, family, weight_type="F32", **fields)
    ids = token_ids(length=40)
    model = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0, n_threads=1)
    try:
        model.eval(ids[0].tolist())
        found = torch.from_numpy(np.array(model.scores[: ids.shape[1]]))
    finally:
        model.close()
    expected = model_by_tables(path, **AS_IN_LLAMA_CPP.get(case, {}))
    torch.testing.assert_close(found, logits(expected, ids)[0], rtol=0, atol=TOLERANCE.get(case, 1e-3))


def test_every_family_that_can_be_written_is_tested() -> None:
    assert {family for family, _ in CASES.values()} == set(CONVERTERS)


def assert_same_weights(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Every parameter and persistent buffer, bit for bit."""
    weights, wanted = found.state_dict(), expected.state_dict()
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), name


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits `[1, T, V]` of random tokens."""
    return model(input_ids=token_ids(length=12) if ids is None else ids).logits


# The architectures that Transformers reads itself. It does not read the sizes of experts of Qwen's older models, so they are
# those of its default configuration. Its reading of gpt-oss fails at the keys of rotary embeddings.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "minimax_m2": {},
    "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"moe_intermediate_size": 768},
    "qwen3_5_moe": {},
}


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model_from_the_file(tmp_path: Path, family: str) -> None:
    path = write_gguf(tmp_path, family, weight_type="Q8_0", **READ_BY_TRANSFORMERS[family])
    try:
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    except ValueError as error:
        if "not supported yet" not in str(error):
            raise
        pytest.skip(str(error))
    found = model_by_tables(path)
    assert_same_weights(found, expected)
    assert torch.equal(logits(found), logits(expected))
