"""Tiny checkpoints for the tests of stores and opening, and the tensors that a plain load gives."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import build
from transformers import AutoModelForCausalLM

from promoe.scheduler import ExpertKey
from promoe.stores import Store, read_expert


def save(
    folder: Path, family: str = "qwen2_moe", *, shard_size: str = "10GB", fused: bool = False, **build_kwargs: Any
) -> Path:
    """Save a tiny model of `family` in the layout that hub checkpoints have, or with stacked experts."""
    build(family, **build_kwargs).save_pretrained(folder, max_shard_size=shard_size, save_original_format=not fused)
    return folder


def plain_tensors(folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a plain load, tied ones under each name."""
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def expert_tensors(store: Store, key: ExpertKey) -> dict[str, torch.Tensor]:
    """Return the tensors of one expert, read chunk by chunk into a slot that holds garbage before."""
    layout = store.layouts[key.layer_idx]
    slot = torch.full((layout.slot_bytes,), 0xA5, dtype=torch.uint8)
    read_expert(store, key, slot.numpy().data)
    return {
        spec.name: slot[spec.offset_bytes : spec.end_bytes].view(spec.dtype).reshape(spec.shape)
        for spec in layout.tensors
    }


def shards(folder: Path) -> list[Path]:
    """Return the safetensors files, by name."""
    return sorted(folder.glob("*.safetensors"))


def rewrite(path: Path, edit: Any) -> None:
    """Change one safetensors file: `edit(tensors)` on its dict of tensors."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file."""
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    return header


def write_header(path: Path, header: bytes) -> None:
    """Replace the header of a safetensors file by other bytes; the tensors' bytes stay."""
    content = path.read_bytes()
    rest = content[8 + struct.unpack("<Q", content[:8])[0] :]
    path.write_bytes(struct.pack("<Q", len(header)) + header + rest)
