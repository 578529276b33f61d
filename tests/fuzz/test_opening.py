"""Whole checkpoints: what config.json and the files' headers say, before and while a model is opened."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from stores.checkpoints import expert_tensors, rewrite
from tiny_checkpoint import write_checkpoint
from tiny_models import build

import promoe
from promoe.errors import CheckpointError, PromoeError
from promoe.experts.guard import is_guard
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.opening import bank_specs, open_without_experts
from promoe.model.tokenizer import load_tokenizer, prompt_inputs
from promoe.scheduler import ExpertKey
from promoe.stores import FileStore
from promoe.training.collect import open_model

from .inputs import fuzzed, outcome
from .mutations import DEEP, VALUES, damaged, json_bytes, mutated, written

SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 8, "num_experts": 4, "layers": 2, "vocab_size": 16}
CODE = """
from pathlib import Path
Path({marker!r}).write_text('ran')
class Own: pass
OwnConfig = OwnModel = OwnTokenizer = Own
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoint"
    build("qwen2_moe", **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """Everything but the experts, and that the experts can be read."""
    model = open_without_experts(folder)
    try:
        for layer in model.layers:
            for expert_idx in range(layer.num_experts):
                expert_tensors(model.store, ExpertKey(layer.layer_idx, expert_idx))
        return {name: tensor for name, tensor in model.model.state_dict().items() if not is_guard(tensor)}
    finally:
        model.store.close()


def check_config(folder: Path, content: bytes, tensors: dict[str, torch.Tensor]) -> None:
    whole = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(content)
    try:
        found = outcome("checkpoint: config.json", lambda: opened(folder))
    finally:
        (folder / "config.json").write_bytes(whole)
    for name, tensor in (found or {}).items():
        if name in tensors:
            assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name


@fuzzed(25)
@given(data=st.data())
def test_configurations(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    small = (
        st.integers(-2, 70)
        | st.none()
        | st.booleans()
        | st.sampled_from(("", "x", "silu", "mixtral", [], {}, 0.5, 2**40, 2**63))
    )
    # Not numbers of layers that are merely large: each is built, and that takes a while.
    check_config(folder, data.draw(json_bytes(config, small)), tensors)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_experts": 10**9},
        {"num_experts": 2**62},
        {"num_experts_per_tok": 10**9},
        {"hidden_size": 2**40},
        {"num_attention_heads": 0},
        {"vocab_size": 2**50},
        {"model_type": ["qwen2_moe"]},
        {"architectures": 3},
        {"architectures": ["os"], "model_type": "t5"},
        {"rope_parameters": {"rope_type": "none"}},
        {"rope_parameters": 3},
        {"dtype": "float99"},
        {"dtype": "nn"},
        {"layer_types": [1, 2]},
        {"quantization_config": 7},
        {"quantization_config": {"quant_method": []}},
        {"hidden_act": "__class__"},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": "ab"},
        {"text_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_configurations_of_another_kind(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], change: dict[str, Any]
) -> None:
    check_config(folder, json.dumps(config | change).encode(), tensors)


def test_a_configuration_of_any_depth(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    check_config(folder, b'{"model_type": ' + b"[" * DEEP, tensors)


@fuzzed(15)
@given(data=st.data())
def test_generation_configurations(folder: Path, tensors: dict[str, torch.Tensor], data: st.DataObject) -> None:
    path = folder / "generation_config.json"
    whole = path.read_bytes()
    path.write_bytes(data.draw(json_bytes(json.loads(whole) | {"temperature": 0.5, "max_length": 20})))
    try:
        found = outcome("checkpoint: generation_config.json", lambda: opened(folder))
    finally:
        path.write_bytes(whole)
    for name, tensor in (found or {}).items():
        assert torch.equal(tensor, tensors[name]), name


class Stored:
    """A model, and its checkpoint as a header and the tensors' bytes."""

    def __init__(self, folder: Path) -> None:
        self.model = build("qwen2_moe", **SIZES)
        self.path = folder / "stored.safetensors"
        content = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        self.header, self.data = json.loads(content[8 : 8 + length]), content[8 + length :]
        self.layers = [bank_specs(layer) for layer in find_moe_layers(self.model)]

    def experts(self) -> dict[ExpertKey, dict[str, torch.Tensor]]:
        store = FileStore.open(self.path, self.model, self.layers)
        try:
            keys = [ExpertKey(layer, idx) for layer, count in enumerate(store.num_experts) for idx in range(count)]
            return {key: expert_tensors(store, key) for key in keys}
        finally:
            store.close()


@pytest.fixture(scope="module")
def stored(folder: Path) -> Iterator[Stored]:
    stored = Stored(folder)
    yield stored
    stored.path.unlink(missing_ok=True)


@st.composite
def headers(draw: st.DrawFn, header: dict[str, Any]) -> dict[str, Any]:
    """Entries changed, dropped, renamed to others' names, or with the place of another."""
    names = sorted(name for name in header if ".experts." in name)
    result: dict[str, Any] = {**header}
    for _ in range(draw(st.integers(1, 3))):
        one, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        how = draw(st.integers(0, 4))
        if one not in result or other not in result:
            continue
        if how == 0:
            result[one], result[other] = result[other], result[one]
        elif how == 1:
            result[
                draw(
                    st.sampled_from(
                        (one.replace("experts.0", "experts.9"), one.upper(), other + ".x", one[6:], "lm_head." + one)
                    )
                )
            ] = result.pop(one)
        elif how == 2:
            result[one] = {
                **result[one],
                "shape": draw(st.sampled_from(([256], [8, 32], [32, 8], [16, 16], [1, 8, 32], []))),
            }
        elif how == 3:
            result[one] = {
                **result[one],
                "dtype": draw(st.sampled_from(("I32", "U32", "F32", "BF16", "F4", "F8_E4M3"))),
            }
        else:
            return draw(mutated(result, VALUES))  # type: ignore[no-any-return]
    return result


@fuzzed(60)
@given(data=st.data())
def test_headers(stored: Stored, data: st.DataObject) -> None:
    header = written(data.draw(headers(stored.header)))
    content = struct.pack("<Q", len(header)) + header + stored.data
    stored.path.write_bytes(content)
    found = outcome("checkpoint: headers", stored.experts)
    if found is None:
        return
    try:
        tensors = load(content)
    except (safetensors.SafetensorError, KeyError):
        return
    for key, expert in found.items():
        for prefix in ("model.", ""):
            name = f"{prefix}layers.{key.layer_idx}.mlp.experts.{key.expert_idx}"
            if all(f"{name}.{part}_proj.weight" in tensors for part in ("gate", "up", "down")):
                gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
                assert torch.equal(expert["gate_up_proj"], torch.cat([gate, up]).to(torch.float32)), name
                assert torch.equal(expert["down_proj"], down.to(torch.float32)), name
                break


def test_a_tensor_that_is_larger_than_the_model_is_not_read(folder: Path, tmp_path: Path) -> None:
    """A sparse file: 2 TiB by its size, nothing on disk."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    content = (tmp_path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    end = len(data) + 4 * 32 * 2**34
    header["lm_head.weight"] = {"dtype": "F32", "shape": [2**34, 32], "data_offsets": [len(data), end]}
    new = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + data)
    try:
        os.truncate(tmp_path / "model.safetensors", 8 + len(new) + end)
    except OSError:
        pytest.skip("this file system has no sparse files of 2 TiB")
    with pytest.raises(CheckpointError, match="more elements than the whole model"):
        open_without_experts(tmp_path)


def test_an_index_for_transformers_that_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    """With a variant Transformers finds the files."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (inner / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    with pytest.raises(PromoeError, match="outside"):
        open_without_experts(inner, variant="fp16")


class TestCodeOfACheckpoint:
    """Only `trust_remote_code=True` lets it run, which promoe refuses; nor is anybody asked."""

    @pytest.fixture
    def hostile(self, tmp_path: Path) -> Path:
        folder = write_checkpoint(tmp_path / "checkpoint")
        (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
        classes = {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForCausalLM": "own.OwnModel",
            "AutoTokenizer": ["own.OwnTokenizer", None],
        }
        for name in ("config.json", "tokenizer_config.json"):
            values = json.loads((folder / name).read_text())
            values["auto_map"] = classes
            (folder / name).write_text(json.dumps(values))
        return folder

    def asked(self, *_: object) -> str:
        raise AssertionError("asked on the terminal")

    @pytest.mark.parametrize("model_type", ["qwen2_moe", "own"])
    @pytest.mark.parametrize("what", ["model", "tokenizer", "recorded", "recorded from disk"])
    def test_it_does_not_run(self, hostile: Path, model_type: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.input", self.asked)
        path = hostile / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
        (hostile / "tokenizer_config.json").write_text(
            (hostile / "tokenizer_config.json").read_text().replace("TokenizersBackend", "OwnTokenizer")
        )
        try:
            if what == "model":
                promoe.from_pretrained(hostile).promoe.close()
            elif what == "tokenizer":
                load_tokenizer(str(hostile))
            else:
                model, _ = open_model(str(hostile), "auto", "50%" if what == "recorded from disk" else None)
                if what == "recorded from disk":
                    model.promoe.close()
        except PromoeError:
            assert model_type == "own" or what != "model"
        assert not (hostile.parent / "ran").exists()

    def test_trust_is_refused_by_name(self, hostile: Path) -> None:
        with pytest.raises(PromoeError, match="trust_remote_code"):
            promoe.from_pretrained(hostile, trust_remote_code=True)

    def test_a_pickle_of_weights_is_not_opened(self, tmp_path: Path) -> None:
        class Hostile:
            def __reduce__(self) -> Any:
                return (open, (str(tmp_path / "ran"), "w"))

        folder = write_checkpoint(tmp_path / "checkpoint")
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
        for opening in (lambda: promoe.from_pretrained(folder), lambda: open_model(str(folder), "auto", None)):
            with pytest.raises(CheckpointError):
                opening()
        assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fuzz") / "tokenizer")


@fuzzed(15)
@given(data=st.data(), name=st.sampled_from(("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")))
def test_tokenizers(with_tokenizer: Path, data: st.DataObject, name: str) -> None:
    path = with_tokenizer / name
    whole = path.read_bytes()
    values = None if name.endswith("jinja") else json.loads(whole)
    how = damaged(whole) if values is None else st.one_of(json_bytes(values), damaged(whole))
    path.write_bytes(data.draw(how))
    try:
        tokenizer = outcome("checkpoint: tokenizer", lambda: load_tokenizer(str(with_tokenizer)))
        if tokenizer is not None:
            outcome("checkpoint: tokenizer, used", lambda: prompt_inputs(tokenizer, "Why?"))
    finally:
        path.write_bytes(whole)


@fuzzed(15)
@given(
    name=st.sampled_from(
        ("x" * 5000, "a\0b", "\ud800", "/dev/null", "/dev/zero", "/", "..", "a/b/c", "", "~", "x/" * 3000)
    )
)
@example(name="x" * 5000)
def test_names(name: str) -> None:
    outcome("checkpoint: names", lambda: load_tokenizer(name))
    outcome("checkpoint: names", lambda: promoe.from_pretrained(name))
