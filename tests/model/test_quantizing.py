"""Experts in fewer bits in files: what is written, what is tied to what, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import FORMS
from quantised_checkpoints import write_fp8, write_packed
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint
from tiny_models import build

import promoe
from promoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from promoe.experts.kernels.formats import FORMATS
from promoe.experts.kernels.int4 import Int4, Int4Format
from promoe.experts.moe_layers import find_moe_layers
from promoe.model import slot_folders
from promoe.model.opening import open_headers
from promoe.model.quantizing import Quantization, quantizable, write_quantized
from promoe.model.slot_index import INDEX
from promoe.stores.slot_files import SLOTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", chat=False, hidden=128, intermediate=64)


def quantise(
    folder: Path, out: Path, bits: int = 4, group: int = 32, method: str = "rtn", **options: Any
) -> Quantization:
    opened = open_headers(folder, **options)
    try:
        slot_format = FORMATS["int8"] if bits == 8 else Int4Format(bits, group)
        return write_quantized(opened.layers, opened.store, out, slot_format, method)
    finally:
        opened.store.close()


@pytest.mark.parametrize("method", ["rtn", "hqq"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_files_hold_what_the_formats_make_of_every_expert(bits: int, method: str, folder: Path, tmp_path: Path) -> None:
    done = quantise(folder, tmp_path / "out", bits, method=method)
    model = promoe.from_pretrained(folder, cache="100%", experts="checkpoint")
    served = promoe.from_pretrained(folder, cache="30%", experts=tmp_path / "out")
    layouts = served.promoe.runtime.engine.store.layouts
    for layer in find_moe_layers(model):
        slots = load_file(tmp_path / "out" / f"layer-{layer.layer_idx:05}.safetensors")[SLOTS]
        own = layer.rows()
        for expert in range(layer.num_experts):
            for spec in layouts[layer.layer_idx].tensors:
                assert spec.format is not None
                written = slots[expert, spec.offset_bytes : spec.end_bytes]
                assert torch.equal(written, spec.format.quantize(own[spec.name][expert], method))
    assert done.nbytes == sum(
        layer.num_experts * layouts[layer.layer_idx].slot_bytes for layer in find_moe_layers(model)
    )
    assert done.plain_bytes == sum(layer.num_experts * layer.layout.slot_bytes for layer in find_moe_layers(model))
    assert done.plain == []
    served.promoe.close()


def test_the_error_of_a_layer_is_that_of_its_weights(folder: Path, tmp_path: Path) -> None:
    done = quantise(folder, tmp_path / "out")
    model = promoe.from_pretrained(folder, cache="100%", experts="checkpoint")
    layers = find_moe_layers(model)
    assert list(done.errors) == [layer.name for layer in layers]
    for layer in layers:
        error = total = 0.0
        for name, rows in layer.rows().items():
            made = Int4Format(4, 32).of(layer.layout[name], False)
            for matrix in torch.stack(list(rows)).detach():
                error += float((made.view(made.pack(matrix)).dense().float() - matrix.float()).square().sum())
                total += float(matrix.float().square().sum())
        assert done.errors[layer.name] == pytest.approx((error / total) ** 0.5, rel=1e-4)


def test_fewer_bits_have_larger_errors(folder: Path, tmp_path: Path) -> None:
    means = []
    for bits in (8, 4, 3, 2):
        errors = quantise(folder, tmp_path / str(bits), bits).errors.values()
        means.append(sum(errors) / len(errors))
    assert means == sorted(means)
    assert means[0] < 0.02 < means[1]


def test_it_goes_on_after_an_interruption(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantise(folder, whole)
    real, read = slot_folders.read_expert, []

    def interrupted(store: Any, key: Any, slot: memoryview) -> None:
        if len(read) == 1000 or (key.layer_idx == 1 and key.expert_idx == 3 and len(read) < 100):
            raise KeyboardInterrupt
        read.append(key)
        real(store, key, slot)

    monkeypatch.setattr(slot_folders, "read_expert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(folder, out)
    assert {path.name for path in out.iterdir()} == {"layer-00000.safetensors", f"{INDEX}.part"}
    with pytest.raises(ConfigError, match=rf"it is not a folder with an {INDEX}"):
        promoe.from_pretrained(folder, experts=out)
    # Measured values of the first call are kept, so that its layers still belong to the others.
    monkeypatch.setattr("promoe.experts.kernels.int4.dense_from", lambda made: 77)
    read.clear()
    read.extend([None] * 100)
    done = quantise(folder, out)
    assert {key.layer_idx for key in read[100:]} == {1, 2}
    assert len(done.errors) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


@pytest.mark.parametrize("change", ["method", "group", "checkpoint"])
def test_what_was_begun_otherwise_is_not_kept(
    change: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    quantise(folder, out)
    (out / INDEX).rename(out / f"{INDEX}.part")  # as if it had been interrupted at the very end
    if change == "checkpoint":
        tensors = load_file(folder / "model.safetensors")
        save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    read = []
    real = slot_folders.read_expert
    monkeypatch.setattr(slot_folders, "read_expert", lambda *args: (read.append(args[1]), real(*args))[1])
    quantise(folder, out, **{"method": {"method": "hqq"}, "group": {"group": 64}, "checkpoint": {}}[change])
    assert {key.layer_idx for key in read} == {0, 1, 2}
    model = promoe.from_pretrained(folder, cache="30%", experts=out)
    model.promoe.close()


def test_a_form_beside_the_checkpoint_is_found_by_name(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"experts='int4' was asked for, but .*promoe-int4 has no .*`promoe quantize MODEL --bits 4`"
    ):
        promoe.from_pretrained(folder, experts="int4")
    quantise(folder, folder / "promoe-int4")
    model = promoe.from_pretrained(folder, experts="int4", cache="30%")
    (matrix,) = {type(spec.format) for spec in model.promoe._pools[0].layout.tensors}
    assert matrix is Int4
    model.promoe.close()
    with pytest.raises(ConfigError, match=r"experts='packed' was asked for, but .*`promoe pack MODEL`"):
        promoe.from_pretrained(folder, experts="packed")


def test_quantised_experts_in_the_place_of_packed_ones_are_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Output never changes unless somebody asks for it."""
    quantise(folder, folder / "promoe-packed")
    model = promoe.from_pretrained(folder, cache="30%")
    assert all(spec.format is None for spec in model.promoe._pools[0].layout.tensors)
    assert "They are quantised, which experts=FOLDER has to ask for. " in caplog.text
    model.promoe.close()


def test_another_checkpoint_is_noticed(folder: Path, tmp_path: Path) -> None:
    quantise(folder, tmp_path / "out")
    other = write_checkpoint(tmp_path / "other", chat=False, hidden=128, intermediate=64)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"other files, or the checkpoint was written since.*promoe quantize"):
        promoe.from_pretrained(other, experts=tmp_path / "out")


def test_codes_that_are_read_in_another_way_are_noticed(tmp_path: Path) -> None:
    # The files are the same: only config.json says what their codes mean.
    folder, _ = write_packed(tmp_path / "model", FORMS["GPTQ 4 bits"], intermediate=64)
    quantise(folder, tmp_path / "out", bits=8)
    promoe.from_pretrained(folder, experts=tmp_path / "out").promoe.close()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq"
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json says otherwise how it is quantised"):
        promoe.from_pretrained(folder, experts=tmp_path / "out")


def test_another_processor_is_noticed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise(folder, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    signature = json.loads(index["matrices"][0]["down_proj"]["signature"])
    other = 96 - signature["block"]
    monkeypatch.setattr("promoe.experts.kernels.int4.kernel_block", lambda: other)
    with pytest.raises(ConfigError, match=r"in the format 'int4' of another processor"):
        promoe.from_pretrained(folder, experts=tmp_path / "out")


def test_damaged_layers_are_noticed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantise(folder, out)
    quantise(folder, tmp_path / "hqq", method="hqq")
    shutil.copy(tmp_path / "hqq" / "layer-00001.safetensors", out / "layer-00001.safetensors")
    with pytest.raises(ConfigError, match=r"layer-00001.safetensors does not belong to the experts"):
        promoe.from_pretrained(folder, experts=out)


def test_matrices_of_other_sizes_stay_as_they_are(tmp_path: Path) -> None:
    build("qwen3_moe", dtype=torch.bfloat16, hidden=64, intermediate=32, top_k=3).save_pretrained(tmp_path)
    done = quantise(tmp_path, tmp_path / "out")
    assert done.plain == ["down_proj"]
    full, few = (promoe.from_pretrained(tmp_path, cache=cache, experts=tmp_path / "out") for cache in ("100%", "30%"))
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        assert torch.equal(full(ids).logits, few(ids).logits)
    full.promoe.close()
    few.promoe.close()


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    build("qwen3_moe", dtype=torch.float32, hidden=64, intermediate=64).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"needs matrices in bfloat16 .*Found .*float32"):
        quantise(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = quantise(tmp_path, tmp_path / "out", dtype="bfloat16")  # as somebody with a checkpoint in fp32 does
    assert done.nbytes < done.plain_bytes / 2
    model = promoe.from_pretrained(tmp_path, dtype="bfloat16", experts=tmp_path / "out", cache="30%")
    model.promoe.close()
    with pytest.raises(ConfigError, match="of another model, or another dtype"):
        promoe.from_pretrained(tmp_path, experts=tmp_path / "out", cache="30%")


def test_a_group_that_no_matrix_fits_is_named(tmp_path: Path) -> None:
    build("qwen3_moe", dtype=torch.bfloat16, hidden=192, intermediate=192).save_pretrained(tmp_path)
    opened = open_headers(tmp_path)
    with closing(opened.store):
        for group in (32, 64):
            assert all(quantizable(opened.layers, Int4Format(4, group)).values())
        with pytest.raises(
            UnsupportedModelError,
            match=r"they have 192 inputs, which is no multiple of 128\. Groups of 32 or 64 fit",
        ):
            quantizable(opened.layers, Int4Format(4, 128))


def test_nan_in_an_expert_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantise(folder, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_quantising_twice_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_fp8(tmp_path, hidden=64, intermediate=64)
    with caplog.at_level(logging.WARNING):
        quantise(tmp_path, tmp_path / "out")
    assert "are in fewer bits already" in caplog.text
    assert "adds a second error" in caplog.text
    model = promoe.from_pretrained(tmp_path, experts=tmp_path / "out", cache="30%")
    model.promoe.close()
