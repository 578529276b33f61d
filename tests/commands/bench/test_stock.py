from __future__ import annotations

from pathlib import Path

import torch
from tiny_checkpoint import write_checkpoint
from zoo import families

from promoe.commands.bench.stock import load_stock
from promoe.training.collect import open_model


def test_models_without_a_causal_class_are_opened_by_their_own(tmp_path: Path) -> None:
    """As promoe opens them: benchmarks compare with them, and traces are collected from them."""
    folder = write_checkpoint(tmp_path / "checkpoint")  # for its tokenizer
    (folder / "model.safetensors").unlink()
    model = families.build("qwen3_vl_moe whole")
    model.save_pretrained(folder)
    assert type(load_stock(folder, torch.float32)) is type(model)
    assert type(open_model(str(folder), "auto", None)[0]) is type(model)
