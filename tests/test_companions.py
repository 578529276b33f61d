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

import pytest
import torch
from packed_weights import FORMS
from quantised_checkpoints import write_fp8, write_mxfp8, write_packed
from safetensors.torch import load_file, save_file
from served import PROMPTS, LinkOver, close, config, greedy, load_stock, plain_link

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
