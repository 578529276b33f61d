"""Weights in fewer bits without what decodes them are refused, in every format and every kind of layer.

Their codes look like weights: taken as they are, logits are wrong, and nothing else tells.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_checkpoints import write_gguf
from packed_weights import FORMS
from quantised_checkpoints import FP8_BLOCK, write_fp8, write_mxfp4, write_mxfp8, write_packed, write_stacked_fp8
from safetensors.torch import load_file, save_file
from served import PROMPTS, LinkOver, close, config, greedy, load_stock, plain_link
from tiny_models import build

import promoe
from promoe.model.opening import open_headers, open_without_experts

Tensors = dict[str, torch.Tensor]

# With two groups of inputs each.
LAYERS = {
    "experts": "model.layers.0.mlp.experts.1.gate_proj",
    "attention": "model.layers.1.self_attn.q_proj",
}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "fp8": write_fp8,
    "mxfp8": write_mxfp8,
    **{name: lambda folder, form=form: write_packed(folder, form)[0] for name, form in FORMS.items()},  # type: ignore[misc]
}
# Names of the tensors of a module that a weight in fewer bits is decoded from.
PARTS = ("weight", "weight_packed", "weight_scale_inv", "weight_scale", "weight_zero_point", "weight_g_idx")
PARTS += ("qweight", "qzeros", "scales", "g_idx")
# What a format can do without, because the tensors tell as much without it.
OPTIONAL = dict.fromkeys(("GPTQ 4 bits", "GPTQ 8 bits", "GPTQ 2 bits", "AutoRound auto_gptq"), ("g_idx",))


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tensors]:
    """The name of a format, and a sound checkpoint in it with its tensors, all of which stay as they are."""
    folder = WRITERS[request.param](tmp_path_factory.mktemp("sound"))
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return request.param, folder, tensors


def build_plain(folder: Path, quantisation: dict[str, Any]) -> Path:
    """A checkpoint in 16 bits whose config.json says that it is quantised."""
    build("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": quantisation}))
    return folder


def refusal(sound: Path, tensors: Tensors, folder: Path) -> str:
    """The message with which a checkpoint with the configuration of `sound` and these tensors is refused."""
    folder.mkdir()
    shutil.copy(sound / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        with pytest.raises(promoe.CheckpointError) as caught:
            open_without_experts(folder).store.close()
    finally:
        shutil.rmtree(folder)
    return str(caught.value)


def wrong_forms(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """What may stand in place of a tensor, and how it is wrong."""
    yield "missing", {}
    yield "renamed", {f"{name}_2": tensor}
    yield "longer", {name: torch.cat([tensor] * 3) if tensor.dim() else tensor.repeat(3)}
    yield "of another rank", {name: tensor.reshape(-1, 1, 1)}
    if tensor.numel() > 1:
        yield "of one number", {name: tensor.flatten()[:1].clone()}
    yield "of 64 bits", {name: tensor.float().long()}


@pytest.mark.parametrize("layer", LAYERS)
def test_each_part(written: tuple[str, Path, Tensors], layer: str, tmp_path: Path) -> None:
    """Missing, under another name, of another shape, or of another dtype."""
    form, sound, tensors = written
    module = LAYERS[layer]
    parts = [name for name in tensors if name.rpartition(".")[0] == module and name.rpartition(".")[2] in PARTS]
    assert len(parts) > 1
    for name in parts:
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        for how, wrong in wrong_forms(name, tensors[name]):
            if how == "missing" and name.rpartition(".")[2] in OPTIONAL.get(form, ()):
                continue
            try:
                found = refusal(sound, others | wrong, tmp_path / "wrong")
            except BaseException as error:
                raise AssertionError(f"{name} {how}: {error}") from error
            assert f"{module}" in found or "missing expert 1" in found, f"{name} {how}: {found}"


def test_the_scale_of_attention_is_named(tmp_path: Path) -> None:
    """With the tensor, its file, what it needs, and what is beside it."""
    sound = write_fp8(tmp_path)
    tensors = load_file(sound / "model.safetensors")
    name = f"{LAYERS['attention']}.weight"
    tensors[f"{name}_scale"] = tensors.pop(f"{name}_scale_inv")
    found = refusal(sound, tensors, tmp_path / "wrong")
    assert f"'{name}' has dtype F8_E4M3 in model.safetensors, but {name} [64, 64] torch.bfloat16 was expected" in found
    assert "needs weight_scale_inv (quant_method fp8, mxfp8)" in found
    assert f"Found beside it: {name}_scale [2, 2] F32." in found


def test_scales_of_layers_that_are_not_converted(tmp_path: Path) -> None:
    """What config.json says of them does not make codes weights. Weights in 16 bits need no scales, with or without it."""
    sound = write_fp8(tmp_path / "sound")
    config_path = sound / "config.json"
    fields = json.loads(config_path.read_text())
    fields["quantization_config"]["modules_to_not_convert"] = ["lm_head", "q_proj"]
    config_path.write_text(json.dumps(fields))
    tensors = load_file(sound / "model.safetensors")
    name = f"{LAYERS['attention']}.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    assert name in refusal(sound, tensors, tmp_path / "wrong")
    assert name in refusal(
        sound, {**tensors, name: tensors[name].bfloat16(), f"{name}_scale_inv": scales}, tmp_path / "wrong"
    )
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, sound / "model.safetensors", metadata={"format": "pt"})
    opened = open_without_experts(sound)
    with closing(opened.store):
        assert torch.equal(opened.model.get_parameter(name), tensors[name])


@pytest.mark.parametrize("method", [*WRITERS, "mxfp4"])
def test_layers_that_are_usually_in_16_bits(method: str, tmp_path: Path) -> None:
    """The head, the embedding and gates: codes without scales, whatever config.json says of other layers."""
    sound = build_plain(tmp_path, FORMS[method].config if method in FORMS else {"quant_method": method})
    tensors = load_file(sound / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32):
            found = refusal(sound, {**tensors, name: tensors[name].to(dtype)}, tmp_path / "wrong")
            assert f"'{name}' has dtype" in found


def test_codes_without_a_quantization_config(tmp_path: Path) -> None:
    sound = write_fp8(tmp_path / "sound")
    tensors = load_file(sound / "model.safetensors")
    config_path = sound / "config.json"
    fields = json.loads(config_path.read_text())
    del fields["quantization_config"]
    config_path.write_text(json.dumps(fields))
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    plain |= {name: tensor.bfloat16() for name, tensor in plain.items() if LAYERS["attention"] not in name}
    assert LAYERS["attention"] in refusal(sound, plain, tmp_path / "wrong")


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_stacked_experts_in_mxfp4(name: str, tmp_path: Path) -> None:
    sound = write_mxfp4(tmp_path)
    tensors = load_file(sound / "model.safetensors")
    weight = f"model.layers.0.mlp.experts.{name}"
    for part in (f"{weight}_blocks", f"{weight}_scales"):
        others = {other: tensor for other, tensor in tensors.items() if other != part}
        for how, wrong in wrong_forms(part, tensors[part]):
            assert weight in refusal(sound, others | wrong, tmp_path / "wrong"), how
        for dtype in (torch.int8, torch.bfloat16, torch.float8_e8m0fnu):
            changed = {
                **others,
                part: tensors[part].view(torch.int8) if dtype == torch.int8 else tensors[part].to(dtype),
            }
            assert f"{part} " in refusal(sound, changed, tmp_path / "wrong")


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    """With scales of their own they are read; scales of fewer experts, or of other blocks, are refused."""
    sound = write_stacked_fp8(tmp_path, top_k=3)
    tensors = load_file(sound / "model.safetensors")
    stacks = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    scales = {}
    for name in stacks:
        count, outputs, inputs = tensors[name].shape
        shape = (count, outputs // FP8_BLOCK, inputs // FP8_BLOCK)
        scales[f"{name}_scale_inv"] = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    first = f"{stacks[0]}_scale_inv"
    for wrong in (
        scales[first][:-1],
        scales[first][0],
        scales[first].flatten(0, 1),
        scales[first][:, :1],
        torch.ones(1),
    ):
        found = refusal(sound, {**tensors, **scales, first: wrong.contiguous()}, tmp_path / "wrong")
        assert f"'{stacks[0]}' (F8_E4M3 in model.safetensors)" in found
    plain = tmp_path / "plain"
    plain.mkdir()
    fields = json.loads((sound / "config.json").read_text())
    del fields["quantization_config"]
    (plain / "config.json").write_text(json.dumps(fields))
    decoded = {
        name: tensors[name].float() * grid.repeat_interleave(FP8_BLOCK, 1).repeat_interleave(FP8_BLOCK, 2)
        for name in stacks
        for grid in (scales[f"{name}_scale_inv"],)
    }
    in_16_bits = tensors | {name: weight.bfloat16() for name, weight in decoded.items()}
    save_file(in_16_bits, plain / "model.safetensors", metadata={"format": "pt"})
    expected = greedy(load_stock(plain), PROMPTS["short"])
    save_file(tensors | scales, sound / "model.safetensors", metadata={"format": "pt"})
    model = promoe.from_pretrained(sound, cache="40%", link=LinkOver(plain_link), config=config())
    try:
        greedy(model, PROMPTS["short"]).assert_equals(expected)
    finally:
        close(model)


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_down_exps.weight", "output.weight"])
def test_whole_numbers_in_gguf_files(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe", weight_type="F16")
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = (one for one in reader.tensors if one.name == name)
    kind = tensor.field.parts[-2]
    assert kind[0] == gguf.GGMLQuantizationType.F16
    kind[0] = gguf.GGMLQuantizationType.I16
    reader.data.flush()
    with pytest.raises(promoe.CheckpointError, match=rf"'{name}' has dtype I16 in {path.name}"):
        open_without_experts(path).store.close()


def test_unknown_tensors_beside_a_weight(tmp_path: Path) -> None:
    """A second scale changes what codes mean. One of activations, or of the KV cache, does not."""
    sound = write_fp8(tmp_path / "sound")
    tensors = load_file(sound / "model.safetensors")
    module = LAYERS["attention"]
    for own in ("weight_scale_2", "pre_quant_scale", "zero_point"):
        found = refusal(sound, {**tensors, f"{module}.{own}": torch.ones(1)}, tmp_path / "wrong")
        assert re.search(rf"'{module}.weight' is in fp8.*Beside them is {module}.{own} \[1\] F32", found)
    for own in ("input_scale", "activation_scale", "k_scale", "output_scale", "bias"):
        tensors[f"{module}.{own}"] = torch.ones(1)
    save_file(tensors, sound / "model.safetensors", metadata={"format": "pt"})
    open_headers(sound).store.close()


@pytest.mark.parametrize("name", ["scale", "qscale_weight"])
def test_scales_under_other_names_that_transformers_reads(name: str, tmp_path: Path) -> None:
    sound = write_fp8(tmp_path, top_k=3)
    expected = greedy(load_stock(sound), PROMPTS["short"])
    tensors = load_file(sound / "model.safetensors")
    changed = {key.replace("weight_scale_inv", name): tensor for key, tensor in tensors.items()}
    save_file(changed, sound / "model.safetensors", metadata={"format": "pt"})
    model = promoe.from_pretrained(sound, cache="40%", link=LinkOver(plain_link), config=config())
    try:
        greedy(model, PROMPTS["short"]).assert_equals(expected)
    finally:
        close(model)
