"""What tells two models apart, and what does not."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from gguf_checkpoints import write_gguf
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint

from promoe.errors import CheckpointError
from promoe.model.identity import identity_of
from promoe.stores.tensor_files import TensorFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def test_a_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    expected = identity_of(str(folder))
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (5, 5))
    (copy / "README.md").write_text("another")
    (copy / "answers.jsonl").write_text("another")
    assert identity_of(str(copy)) == expected
    assert identity_of(f"{copy}/") == expected


def test_other_weights_settings_tokens_or_forms_are_another_model(folder: Path) -> None:
    found = [identity_of(str(folder))]
    found += [identity_of(str(folder), "int8"), identity_of(str(folder), "auto", "fast")]
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "experts" in name)
    save_file({**weights, name: torch.zeros_like(weights[name])}, folder / "model.safetensors", {"format": "pt"})
    found.append(identity_of(str(folder)))
    for file, key in {
        "generation_config.json": "top_k",
        "config.json": "rms_norm_eps",
        "tokenizer.json": "more",
    }.items():
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: 5}))
        found.append(identity_of(str(folder)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found.append(identity_of(str(folder)))
    assert len(set(found)) == len(found)


def test_experts_that_were_written_in_another_way_are_another_form(folder: Path) -> None:
    (folder / "promoe-int4").mkdir()
    index = folder / "promoe-int4" / "experts.json"
    index.write_text('{"method": "rtn"}')
    before = identity_of(str(folder), "int4"), identity_of(str(folder)), identity_of(str(folder), str(index.parent))
    index.write_text('{"method": "hqq"}')
    after = identity_of(str(folder), "int4"), identity_of(str(folder)), identity_of(str(folder), str(index.parent))
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False]


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one", "qwen3_moe")
    expected = identity_of(str(path))
    assert identity_of(str(path.parent)) == expected
    renamed = shutil.copy(path, tmp_path / "renamed.gguf")
    assert identity_of(str(renamed)) == expected
    with closing(TensorFile.open(path)) as opened:
        tensor = max(opened.tensors.values(), key=lambda one: one.offset_bytes)
    with open(renamed, "r+b") as file:
        file.seek(tensor.offset_bytes + tensor.nbytes // 2)
        file.write(b"\x55\x56")
    assert identity_of(str(renamed)) != expected


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for commit in ("aaa", "aaa", "bbb"):
        path = tmp_path / "snapshots" / commit / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        monkeypatch.setattr("transformers.utils.cached_file", lambda name, *_, path=path, **options: str(path))
        found.append(identity_of("org/model"))
    assert found[0] == found[1] != found[2]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        identity_of(str(tmp_path / "nowhere"))
