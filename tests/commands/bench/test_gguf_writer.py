"""Files are read back with the reader of the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from numpy.typing import NDArray
from tiny_models import build

from promoe.commands.bench.gguf_writer import architecture_of, computes_alike, write_gguf
from promoe.commands.bench.systems import EXACT
from promoe.errors import ConfigError

HIDDEN, WIDTH, EXPERTS, LAYERS = 64, 32, 8, 2


def written(folder: Path, family: str, gguf_type: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    """A tiny model, and the tensors of its file by name."""
    model = build(family, dtype=dtype, hidden=HIDDEN, layers=LAYERS, **{"intermediate": WIDTH, **fields})
    model.save_pretrained(folder / "checkpoint")
    write_gguf(folder / "checkpoint", folder / "model.gguf", gguf_type, dtype)
    return model, {tensor.name: tensor for tensor in GGUFReader(folder / "model.gguf").tensors}


def values(tensor: Any) -> NDArray[np.float32]:
    found: NDArray[np.float32] = quants.dequantize(tensor.data, tensor.tensor_type)
    return found


def stacks(model: Any, layer_idx: int) -> dict[str, torch.Tensor]:
    experts = model.model.layers[layer_idx].mlp.experts
    gate_up, down = experts.gate_up_proj.detach().float(), experts.down_proj.detach().float()
    width = gate_up.shape[1] // 2
    return {"gate": gate_up[:, :width], "up": gate_up[:, width:], "down": down}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_without_a_form_every_weight_is_exact(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model, tensors = written(tmp_path, family, EXACT, dtype)
    plain = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    for layer_idx in range(LAYERS):
        layer = model.model.layers[layer_idx]
        for name, stack in stacks(model, layer_idx).items():
            tensor = tensors[f"blk.{layer_idx}.ffn_{name}_exps.weight"]
            assert tensor.tensor_type.name == plain
            assert np.array_equal(values(tensor), stack.numpy())
        others = {"attn_q.weight": layer.self_attn.q_proj.weight, "ffn_gate_inp.weight": layer.mlp.gate.weight}
        if family == "qwen2_moe":
            others["attn_k.bias"] = layer.self_attn.k_proj.bias
            others["ffn_gate_inp_shexp.weight"] = layer.mlp.shared_expert_gate.weight[0]
            others["ffn_down_shexp.weight"] = layer.mlp.shared_expert.down_proj.weight
        else:
            others["attn_k_norm.weight"] = layer.self_attn.k_norm.weight
        for name, weight in others.items():
            found = values(tensors[f"blk.{layer_idx}.{name}"])
            assert np.array_equal(found, weight.detach().float().numpy()), name
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(int(tensor.n_elements) for tensor in tensors.values()) == count


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_matrices_are_quantised_as_the_gguf_package_does(tmp_path: Path, form: str) -> None:
    model, tensors = written(tmp_path, "qwen2_moe", form)
    kind = GGMLQuantizationType[form.upper()]
    for name, stack in stacks(model, 1).items():
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type == kind
        assert np.array_equal(tensor.data, quants.quantize(stack.numpy(), kind))
    output = model.model.layers[0].self_attn.o_proj.weight.detach().float().numpy()
    assert np.array_equal(tensors["blk.0.attn_output.weight"].data, quants.quantize(output, kind))


def test_what_stays_as_it_is_and_what_has_more_bits(tmp_path: Path) -> None:
    """A shared expert of width 72: rows of 72 are not whole blocks of 32."""
    _, tensors = written(tmp_path, "qwen2_moe", "q4_0", shared_expert_intermediate_size=72)
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert types["blk.0.ffn_up_shexp.weight"] == "Q4_0"
    assert types["blk.0.ffn_down_shexp.weight"] == "BF16"
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"
    for name in ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "attn_norm.weight", "attn_v.bias"):
        assert types[f"blk.1.{name}"] == "F32"


def test_tied_embeddings_are_written_twice(tmp_path: Path) -> None:
    _, tensors = written(tmp_path, "qwen2_moe", "q8_0", tie_word_embeddings=True)
    assert np.array_equal(tensors["token_embd.weight"].data, tensors["output.weight"].data)


def test_the_configuration_is_in_the_header(tmp_path: Path) -> None:
    model, _ = written(tmp_path, "qwen3_moe", EXACT)
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["qwen3moe.embedding_length"] == HIDDEN
    assert fields["qwen3moe.expert_feed_forward_length"] == WIDTH
    assert (fields["qwen3moe.expert_count"], fields["qwen3moe.expert_used_count"]) == (EXPERTS, 2)
    assert fields["qwen3moe.attention.key_length"] == HIDDEN // 4
    assert fields["qwen3moe.rope.freq_base"] == pytest.approx(model.config.rope_parameters["rope_theta"])
    assert fields["qwen3moe.vocab_size"] == model.config.vocab_size
    assert fields["tokenizer.ggml.model"] == "none"


@pytest.mark.parametrize(
    ("family", "norm_topk_prob", "alike"),
    [("qwen2_moe", False, True), ("qwen2_moe", True, False), ("qwen3_moe", True, True), ("qwen3_moe", False, False)],
)
def test_what_llama_cpp_computes_alike(family: str, norm_topk_prob: bool, alike: bool) -> None:
    assert computes_alike(build(family, norm_topk_prob=norm_topk_prob).config) == alike


def test_models_that_no_file_is_written_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"written for qwen2_moe, qwen3_moe\. Got a model of the family 'mixtral'"):
        architecture_of(build("mixtral").config)
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match="has rope_type 'linear'"):
        architecture_of(build("qwen2_moe", rope_parameters=rope).config)
    with pytest.raises(ConfigError, match="experts in 1 of 2 layers"):
        written(tmp_path, "qwen2_moe", EXACT, mlp_only_layers=[0])
    assert not (tmp_path / "model.gguf").exists()
