from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.bench.peers import READY, open_peer, prepare
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.systems import Kind
from promoe.experts.moe_layers import find_moe_layers

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.mark.parametrize("kind", ["page-cache", "disk-offload"])
def test_a_peer_gives_the_unmodified_models_logits(checkpoint: Path, tmp_path: Path, kind: Kind) -> None:
    stock = load_stock(checkpoint, torch.bfloat16)
    prepare(kind, stock, checkpoint, tmp_path / "peer")
    peer: Any = open_peer(kind, checkpoint, torch.bfloat16, tmp_path / "peer")
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(peer(input_ids=IDS).logits, stock(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", ["page-cache", "disk-offload"])
def test_a_peers_experts_are_not_in_memory(checkpoint: Path, tmp_path: Path, kind: Kind) -> None:
    """Break the files, and the output breaks: nothing else holds the experts."""
    stock = load_stock(checkpoint, torch.bfloat16)
    prepare(kind, stock, checkpoint, tmp_path / "peer")
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
    prepare("page-cache", stock, checkpoint, folder)
    written = {path: path.stat().st_ino for path in folder.iterdir()}
    prepare("page-cache", stock, checkpoint, folder)
    assert {path: path.stat().st_ino for path in folder.iterdir()} == written
    (folder / "left over").write_text("")
    prepare("page-cache", load_stock(checkpoint, torch.float32), checkpoint, folder)
    assert not (folder / "left over").exists()
    assert "float32" in (folder / READY).read_text()
