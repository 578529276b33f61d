from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.bench import peers, systems
from promoe.commands.bench.peers import GGUF, READY, note_on_gguf, open_llama_cpp, open_peer, prepare
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.systems import KNOWN, Kind, find_systems
from promoe.errors import ConfigError
from promoe.experts.moe_layers import find_moe_layers

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.mark.parametrize("kind", ["page-cache", "disk-offload"])
def test_a_peer_gives_the_unmodified_models_logits(checkpoint: Path, tmp_path: Path, kind: Kind) -> None:
    stock = load_stock(checkpoint, torch.bfloat16)
    prepare(KNOWN[kind], stock, checkpoint, tmp_path / "peer")
    peer: Any = open_peer(kind, checkpoint, torch.bfloat16, tmp_path / "peer")
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(peer(input_ids=IDS).logits, stock(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", ["page-cache", "disk-offload"])
def test_a_peers_experts_are_not_in_memory(checkpoint: Path, tmp_path: Path, kind: Kind) -> None:
    """Break the files, and the output breaks: nothing else holds the experts."""
    stock = load_stock(checkpoint, torch.bfloat16)
    prepare(KNOWN[kind], stock, checkpoint, tmp_path / "peer")
    for path in (tmp_path / "peer").rglob("*"):
        if path.suffix in (".bin", ".dat"):
            path.write_bytes(b"\0" * path.stat().st_size)
    peer: Any = open_peer(kind, checkpoint, torch.bfloat16, tmp_path / "peer")
    with torch.inference_mode():
        assert not torch.equal(peer(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    assert len(find_moe_layers(stock)) == 3


def test_files_are_written_once_for_a_model_and_again_for_another(checkpoint: Path, tmp_path: Path) -> None:
    stock = load_stock(checkpoint, torch.bfloat16)
    folder = tmp_path / "peer"
    prepare(KNOWN["page-cache"], stock, checkpoint, folder)
    written = {path: path.stat().st_ino for path in folder.iterdir()}
    prepare(KNOWN["page-cache"], stock, checkpoint, folder)
    assert {path: path.stat().st_ino for path in folder.iterdir()} == written
    (folder / "left over").write_text("")
    prepare(KNOWN["page-cache"], load_stock(checkpoint, torch.float32), checkpoint, folder)
    assert not (folder / "left over").exists()
    assert "float32" in (folder / READY).read_text()


def test_llama_cpp_gets_a_file_in_its_form(checkpoint: Path, tmp_path: Path) -> None:
    stock = load_stock(checkpoint, torch.bfloat16)
    quantised, plain, _ = find_systems(["llama-cpp:q8_0", "llama-cpp-no-repack", "gate"])
    sizes = []
    for system in (quantised, plain):
        prepare(system, stock, checkpoint, tmp_path / system.name)
        sizes.append((tmp_path / system.name / GGUF).stat().st_size)
    assert sizes[0] < 0.75 * sizes[1]


def test_llama_cpp_is_opened_as_its_system_says(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LlamaCpp", lambda *args, **options: (*args, options))
    found: Any = open_llama_cpp(KNOWN["llama-cpp"], checkpoint, tmp_path, 64)
    assert found == (tmp_path / GGUF, 64, torch.get_num_threads(), {"repack": True, "banned": [0]})
    found = open_llama_cpp(KNOWN["llama-cpp-no-repack"], checkpoint, tmp_path, 64)
    assert found[-1]["repack"] is False


@pytest.mark.parametrize(("ids", "expected"), [(None, []), (7, [7]), ([7, 9], [7, 9])])
def test_tokens_that_end_an_answer(checkpoint: Path, tmp_path: Path, ids: Any, expected: list[int]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
    assert peers._end_tokens(tmp_path) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert peers._end_tokens(tmp_path) == [5]


def test_what_is_said_of_llama_cpp_beside_a_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    monkeypatch.setattr(systems, "find_spec", lambda name: "found")
    llama, ours = KNOWN["llama-cpp"], find_systems(["gate:q8_0"])[1]
    for norm_topk_prob in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": norm_topk_prob}))
        for system in (llama, ours):
            words = note_on_gguf(system, tmp_path)
            assert words.endswith("compare the times, and tokens only among such systems") == norm_topk_prob
            assert bool(words) == norm_topk_prob
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs gguf and llama-cpp-python, and .*pip install 'promoe\[bench-llama\]'"
    ):
        note_on_gguf(llama, tmp_path)
    with pytest.raises(ConfigError, match="needs gguf, and gguf cannot be found"):
        note_on_gguf(ours, tmp_path)
