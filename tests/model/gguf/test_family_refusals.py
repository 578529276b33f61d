"""What the tables of GGUF architectures refuse: they never guess."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_checkpoints import CONVERTERS, read_gguf, write_gguf
from gguf_tables import metadata_of

from promoe.errors import CheckpointError
from promoe.model.gguf.families import FAMILIES
from promoe.model.opening import open_headers

Contents = tuple[dict[str, Any], dict[str, tuple[int, ...]]]


@functools.cache
def contents(family: str) -> Contents:
    """The metadata and shapes of a tiny model's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder), family)
        return metadata_of(path), {name: tuple(tensor.shape) for name, tensor in read_gguf(path).items()}


def config(family: str, keys: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """The configuration of a file with other metadata (None: without the key) and further tensors."""
    metadata, shapes = contents(family)
    architecture = metadata["general.architecture"]
    changed = metadata | {f"{architecture}.{name}": value for name, value in keys.items()}
    changed = {name: value for name, value in changed.items() if value is not None}
    return FAMILIES[architecture].config(changed, shapes | (tensors or {}))


@pytest.mark.parametrize("family", CONVERTERS)
def test_a_key_or_tensor_that_the_model_has_no_place_for(family: str) -> None:
    """Whatever the family: another model of the same architecture may compute something else with it."""
    assert config(family, {})["model_type"] == CONVERTERS[family].model_type
    with pytest.raises(
        CheckpointError, match=r"attention\.novelty is 0\.5, which the model that would be opened does not"
    ):
        config(family, {"attention.novelty": 0.5})
    for name in (
        "blk.0.attn_novelty.weight",
        "blk.1.ffn_up_exps.scale",
        "rope_novelty.weight",
        "blk.0.attn_norm.bias",
    ):
        with pytest.raises(CheckpointError, match=f"has the tensor '{name}', which the model"):
            config(family, {}, {name: (16,)})


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", {"embedding_length": None}, r"its metadata has no qwen3moe\.embedding_length"),
        (
            "qwen3_moe",
            {"embedding_length": "64"},
            "embedding_length is '64', but a whole number below 2.31 was expected",
        ),
        ("qwen3_moe", {"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, but a number was expected"),
        (
            "qwen3_moe",
            {"attention.head_count_kv": [2, 2, 4]},
            r"head_count_kv differs from layer to layer \(\[2, 2, 4\]\)",
        ),
        ("qwen3_moe", {"attention.value_length": 8}, "value_length is 8, but keys have 16 elements per head"),
        ("qwen3_moe", {"rope.dimension_count": 8}, "dimension_count is 8, but 16 was expected: the whole head"),
        ("qwen3_moe", {"rope.scaling.type": "longrope"}, "'longrope', but none, linear or yarn was expected"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5, which Qwen's models do not have"),
        (
            "gemma4",
            {"attention.shared_kv_layers": 2},
            "shared_kv_layers is 2, which Gemma 4 with experts does not have",
        ),
        (
            "gemma4",
            {"attention.sliding_window_pattern": [True] * 4},
            r"\[True, True, True, True\], but one flag per layer",
        ),
        ("gemma4", {"attention.head_count_kv": [2, 2, 1, 2]}, "one number for each kind of attention was expected"),
        ("glm4_moe", {"nextn_predict_layers": 9}, "nextn_predict_layers is 9, of 4 layers"),
        ("qwen3_moe", {"attention.head_count": 0}, "attention.head_count is 0"),
        ("qwen3_moe", {"rope.freq_base": -1.0}, "freq_base is -1.0, but a number above 1 was expected"),
        ("deepseek_v3", {"rope.scaling.yarn_beta_fast": -1.0}, "numbers of rope.scaling are not all above 0"),
        ("deepseek_v3", {"rope.dimension_count": 64}, "keys have 48 elements per head, and 64 of them are rotated"),
        (
            "granitemoehybrid",
            {"ssm.inner_size": 100},
            "inner_size is 100, but a multiple of 8 heads and 64 hidden units",
        ),
        ("nemotron_h", {"feed_forward_length": [0, 32, 0, 64]}, r"one number other than zero was expected for each"),
        ("qwen3_moe", {"block_count": [2**30]}, "block_count is 1073741824, but at most 4096 layers"),
        (
            "qwen3_moe",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.2},
            r"yarn_attn_factor is 1.2, which Transformers and llama\.cpp take for different things",
        ),
        ("qwen2_moe", {"attention.key_length": 32}, "heads have 32 elements, but Qwen2MoE divides the hidden size"),
        ("mixtral", {"expert_count": 0}, r"it has no experts \(expert_count\)"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "finetuned is False, so its attention knows no positions"),
        ("deepseek_v3", {"expert_gating_func": 3}, r"expert_gating_func is 3, but 1 \(softmax\) or 2 \(sigmoid\)"),
        (
            "deepseek_v2",
            {"expert_weights_norm": True},
            "expert_weights_norm is True, which DeepSeek-V2 of Transformers",
        ),
        ("deepseek_v2", {"rope.scaling.yarn_log_multiplier": None}, "has no rope.scaling.yarn_log_multiplier"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "temperature_scale is 0.1, which the model"),
        ("minimax_m2", {"expert_gating_func": 1}, r"expert_gating_func is 1, but 2 \(sigmoid\) was expected"),
        (
            "hunyuan_v1_moe",
            {"expert_feed_forward_length": 64},
            "expert_feed_forward_length is 64, but feed_forward_length",
        ),
        ("lfm2_moe", {"attention.head_count_kv": 2}, r"head_count_kv is \[\], but one number per layer was expected"),
        ("lfm2_moe", {"attention.head_count_kv": [0, 2, 0, 4]}, r"\[0, 2, 0, 4\], but one number per layer"),
    ],
)
def test_what_the_model_cannot_do(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(family, keys)


def test_rotary_embeddings_scaled_by_a_tensor() -> None:
    """As in models made of Llama 3.1: the numbers that they come from are not in the file."""
    with pytest.raises(CheckpointError, match=r"has the tensor 'rope_freqs\.weight', which the model"):
        config("mixtral", {}, {"rope_freqs.weight": (8,)})


def test_latent_attention_in_two_forms() -> None:
    with pytest.raises(CheckpointError, match="keys and values of latent attention twice"):
        config("deepseek_v3", {}, {"blk.0.attn_kv_b.weight": (192, 32)})


def test_what_llama_cpp_takes_for_absent_keys() -> None:
    assert config("qwen3_moe", {"rope.freq_base": None})["rope_parameters"]["rope_theta"] == 10000.0
    assert config("qwen3_moe", {"attention.head_count_kv": None})["num_key_value_heads"] == 4
    assert config("qwen3_moe", {"expert_feed_forward_length": None})["moe_intermediate_size"] == 64 // 2
    assert config("qwen2_moe", {})["norm_topk_prob"] is False
    assert config("qwen2_moe", {"expert_weights_norm": True})["norm_topk_prob"] is True
    assert config("deepseek_v3", {"expert_group_count": None, "expert_group_used_count": None})["n_group"] == 1
    assert config("glm4_moe", {"expert_weights_norm": None})["norm_topk_prob"] is False
    assert config("qwen3_next", {"full_attention_interval": None})["layer_types"][3] == "full_attention"


@pytest.mark.parametrize("family", CONVERTERS)
def test_any_metadata_is_read_or_refused(family: str) -> None:
    """Numbers that lie, other types and missing keys: no other error, no hang."""
    generator = random.Random(family)
    values = [None, 0, 1, -1, 2**31, 2**63, 3.5, float("inf"), "text", True, [], [1, 2], [2**40], [[1]], ["a"]]
    names = [name.partition(".")[2] for name in contents(family)[0] if not name.startswith(("general", "tokenizer"))]
    messages: list[str] = []
    for _ in range(150):
        keys = {generator.choice(names): generator.choice(values) for _ in range(generator.choice((1, 2)))}
        try:
            config(family, keys)
        except CheckpointError as error:
            messages.append(str(error))
    assert messages
    assert max(map(len, messages)) < 1000


def test_a_known_tensor_that_the_configuration_has_no_parameter_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases are known, but only for queries, keys, values and outputs together."""
    bias = {"blk.1.attn_k.bias": torch.ones(32)}
    monkeypatch.setattr(CONVERTERS["qwen3_moe"], "unused", lambda config, tensors: bias, raising=False)
    path = write_gguf(tmp_path, "qwen3_moe")
    with pytest.raises(CheckpointError, match=r"'blk\.1\.attn_k\.bias', which Qwen3MoeConfig has no parameter for"):
        open_headers(path)
    open_headers(path, num_hidden_layers=1).store.close()
