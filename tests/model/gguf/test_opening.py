"""Models opened from GGUF files, compared with those that have all their weights decoded when they are loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils
from gguf_bytes import file_bytes, key
from gguf_checkpoints import CONVERTERS, dequantised_model, tiny_model, write_gguf
from stores.checkpoints import expert_tensors
from tiny_models import token_ids
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, Qwen3MoeForCausalLM
from untouched import open_files, opened_since

import promoe
from promoe.errors import CheckpointError, ConfigError
from promoe.experts.guard import is_guard
from promoe.model import file_tensors
from promoe.model.file_tensors import Reader
from promoe.model.opening import OpenedModel, open_headers, open_without_experts
from promoe.scheduler import ExpertKey
from promoe.stores.safetensors_header import TensorRange


def assert_equal(opened: OpenedModel, expected: PreTrainedModel) -> None:
    """Every tensor and every expert, bit by bit."""
    plain = dict(expected.named_parameters()) | dict(expected.named_buffers())
    found = dict(opened.model.named_parameters()) | dict(opened.model.named_buffers())
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, plain[name].dtype), name
        assert is_guard(tensor) or torch.equal(tensor, plain[name]), name
    for layer in opened.layers:
        for expert_idx in range(layer.num_experts):
            for name, tensor in expert_tensors(opened.store, ExpertKey(layer.layer_idx, expert_idx)).items():
                assert torch.equal(tensor, plain[f"{layer.name}.{name}"][expert_idx]), f"{layer.name}.{name}"


@pytest.mark.parametrize("family", CONVERTERS)
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_every_family(tmp_path: Path, family: str, kind: str) -> None:
    path = write_gguf(tmp_path, family, weight_type=kind)
    opened = open_without_experts(path)
    try:
        assert_equal(opened, dequantised_model(path, family, torch.bfloat16))
    finally:
        opened.store.close()


@pytest.mark.parametrize(("kind", "parts"), [("Q4_K", 3), ("Q6_K", 1), ("IQ4_NL", 1)])
def test_kinds_and_parts(tmp_path: Path, kind: str, parts: int) -> None:
    path = write_gguf(tmp_path, "qwen3_moe", weight_type=kind, expert_type="Q5_K", parts=parts)
    opened = open_without_experts(path)
    try:
        assert len(opened.store.files) == parts
        assert_equal(opened, dequantised_model(path, "qwen3_moe", torch.bfloat16))
    finally:
        opened.store.close()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(token_ids(2, 9)).logits
    return found


@pytest.mark.parametrize("dtype", [None, torch.float32, "float16"])
def test_a_served_model_computes_what_the_decoded_one_does(tmp_path: Path, dtype: Any) -> None:
    path = write_gguf(tmp_path, "qwen3_moe", weight_type="Q8_0")
    chosen = torch.bfloat16 if dtype is None else torch.float16 if dtype == "float16" else dtype
    expected = logits(dequantised_model(path, "qwen3_moe", chosen))
    model = promoe.from_pretrained(path, cache="50%", dtype=dtype, experts="checkpoint")
    assert model.dtype == chosen
    assert torch.equal(logits(model), expected)
    ids = model.generate(token_ids(1, 4), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] <= 7
    model.promoe.close()


def test_names_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, its folder, a folder and the name of a file in it, and the same on the hub."""
    path = write_gguf(tmp_path, "qwen3_moe")

    def found(repository: str, file: str, **options: Any) -> str:
        assert (repository, options) == ("org/name", {"revision": "v1"})
        return str(tmp_path / file)

    monkeypatch.setattr(transformers.utils, "cached_file", found)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (path, {}),
        (str(tmp_path), {}),
        (tmp_path, {"gguf_file": path.name}),
        (tmp_path.parent, {"gguf_file": path.name, "subfolder": tmp_path.name}),
        ("org/name", {"gguf_file": path.name, "revision": "v1"}),
        (f"org/name/{path.name}", {"revision": "v1"}),
    ]
    for name, kwargs in calls:
        opened = open_without_experts(name, **kwargs)
        opened.store.close()
        assert type(opened.model) is Qwen3MoeForCausalLM
        assert opened.model.config.name_or_path == str(path)


def test_only_headers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe")
    opened = open_headers(path)
    expected = dequantised_model(path, "qwen3_moe", torch.bfloat16)
    found = {
        name: (tensor.shape, tensor.dtype) for name, tensor in opened.model.named_parameters() if not is_guard(tensor)
    }
    assert {tensor.device.type for tensor in opened.model.parameters()} <= {"meta", "cpu"}
    for name, (shape, dtype) in found.items():
        parameter = expected.get_parameter(name)
        assert (shape, dtype) == (parameter.shape, parameter.dtype), name
    opened.store.close()


def test_fields_of_the_configuration_and_of_the_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe")
    opened = open_without_experts(path, attn_implementation="eager", num_experts_per_tok=3)
    opened.store.close()
    assert opened.model.config._attn_implementation == "eager"
    assert opened.model.config.num_experts_per_tok == 3
    own = tiny_model("qwen3_moe").config
    own.rms_norm_eps = 0.5
    opened = open_without_experts(path, config=own, auto_class=Qwen3MoeForCausalLM)
    opened.store.close()
    assert opened.model.config.rms_norm_eps == 0.5
    assert own.architectures is None  # the caller's object is left alone
    own.save_pretrained(tmp_path / "own")
    opened = open_without_experts(path, config=tmp_path / "own")
    opened.store.close()
    assert opened.model.config.rms_norm_eps == 0.5
    with pytest.raises(CheckpointError, match=r"\.gguf says num_hidden_layers = 5000, more than 4096"):
        open_without_experts(path, num_hidden_layers=5000)
    with pytest.raises(ConfigError, match="has this argument: check its spelling"):
        open_without_experts(path, no_such_argument=3)
    with pytest.raises(ConfigError, match="Got AutoModelForSeq2SeqLM, which has no such model"):
        open_without_experts(path, auto_class=AutoModelForSeq2SeqLM)


def test_saving_does_not_lead_to_names_of_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe")
    opened = open_without_experts(path)
    opened.store.close()
    assert not getattr(opened.model, "_weight_conversions", None)
    assert opened.model.config.architectures == ["Qwen3MoeForCausalLM"]


def test_the_vocabulary_is_not_kept(tmp_path: Path) -> None:
    opened = open_without_experts(write_gguf(tmp_path, "qwen3_moe"))
    opened.store.close()
    assert [file.metadata for file in opened.store.files] == [{}]  # not None: it is a GGUF file


def test_progress_counts_the_file_s_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe", weight_type="Q8_0")
    calls: list[tuple[int, int]] = []
    opened = open_without_experts(path, progress=lambda done, total: calls.append((done, total)))
    opened.store.close()
    (file,) = opened.store.files
    rest = sum(tensor.nbytes for name, tensor in file.tensors.items() if "_exps" not in name)
    assert calls[-1] == (rest, rest)


def test_blocks_are_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded takes little memory besides the weight."""
    path = write_gguf(tmp_path, "qwen3_moe", weight_type="Q8_0")
    most, sizes = 20 * 68, []
    read = Reader.read

    def counted(self: Reader, where: TensorRange) -> torch.Tensor:
        sizes.append(where.nbytes)
        return read(self, where)

    monkeypatch.setattr(Reader, "read", counted)
    monkeypatch.setattr(file_tensors, "READ_BYTES", most)
    opened = open_without_experts(path)
    try:
        assert_equal(opened, dequantised_model(path, "qwen3_moe", torch.bfloat16))
    finally:
        opened.store.close()
    routers = 8 * 64 * 4  # in fp32
    assert max(sizes) == max(most, routers)


class TestFaults:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_gguf(tmp_path, "qwen3_moe", weight_type="Q8_0", parts=3)

    def refused(self, path: Path, what: str) -> None:
        files = open_files()
        with pytest.raises(CheckpointError, match=what):
            open_without_experts(path)
        assert not opened_since(files)

    def test_a_truncated_file(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-40])
        self.refused(path, r"expected \d+ bytes by its header, found \d+ bytes \(truncated\)")

    def test_a_missing_part(self, path: Path) -> None:
        Path(str(path).replace("00001-of", "00002-of")).unlink()
        self.refused(path, "one of 3 parts, and 1 of them are not in its folder: .*-00002-of-00003")

    def test_a_part_of_another_model(self, path: Path, tmp_path: Path) -> None:
        other = write_gguf(tmp_path / "other", "qwen3_moe", weight_type="Q8_0", parts=3, num_hidden_layers=2)
        shutil.copy(str(other).replace("00001-of", "00003-of"), path.parent)
        self.refused(path, "parts have 39 tensors, and they have|is part 3 of 3|has no tensor")

    def test_no_sizes(self, path: Path, tmp_path: Path) -> None:
        keys = [key("general.architecture", "str", "qwen3moe"), key("qwen3moe.expert_count", "u32", 8)]
        (tmp_path / "m.gguf").write_bytes(file_bytes(keys))
        self.refused(tmp_path / "m.gguf", r"architecture qwen3moe\) cannot be opened")
