"""Tiny checkpoints whose experts are also there in fewer bits, and the model that a device must answer like.

On a device, the reference is the unmodified model whose experts are the expanded matrices, computed by its own kernels.
"""

from __future__ import annotations

import functools
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from served import TOP_K, load_stock
from tiny_models import build
from transformers import PreTrainedModel

import promoe
from promoe.experts.kernels.formats import FORMATS
from promoe.model.opening import open_headers
from promoe.model.quantizing import write_quantized
from promoe.model.slot_folders import default_folder, open_experts
from promoe.scheduler import ExpertKey
from promoe.stores.base import Store, read_expert
from promoe.stores.layout import ExpertLayout

CHUNK_BYTES = 4096


@functools.cache
def quantised(family: str, slot_format: str) -> Path:
    """Folder of a tiny bf16 checkpoint with its experts in this format beside it; made once per process."""
    return write(Path(_scratch().name) / f"{family}-{slot_format}", family, slot_format)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def write(folder: Path, family: str, slot_format: str) -> Path:
    """Write a checkpoint, and its experts in this format beside it."""
    build(family, dtype=torch.bfloat16, intermediate=64, top_k=TOP_K).save_pretrained(folder)
    opened = open_headers(folder)
    with closing(opened.store) as store:
        write_quantized(opened.layers, store, default_folder(store, slot_format), FORMATS[slot_format])
    return folder


def twin(family: str, slot_format: str, implementation: str = "grouped_mm") -> PreTrainedModel:
    """The unmodified model with the expanded matrices of `quantised(family, slot_format)`, which nobody may patch."""
    model = _twin(family, slot_format)
    assert not hasattr(model, "promoe"), "the reference must be the unmodified model's"
    model.set_experts_implementation(implementation)
    return model


@functools.cache
def _twin(family: str, slot_format: str) -> PreTrainedModel:
    return twin_of(quantised(family, slot_format), slot_format)


def twin_of(folder: Path, slot_format: str) -> PreTrainedModel:
    """A new instance of a checkpoint's unmodified model, with the matrices that its quantised experts are."""
    model = load_stock(folder)
    layers = promoe.find_moe_layers(model)
    with closing(open_store(folder, slot_format)) as store, torch.no_grad():
        for layer in layers:
            layout = store.layouts[layer.layer_idx]
            assert layout.formats, "nothing was quantised"
            for idx in range(layer.num_experts):
                slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
                read_expert(store, ExpertKey(layer.layer_idx, idx), slot.numpy().data)
                for name, stack in layer.rows().items():
                    stack[idx].copy_(tensor_of(slot, layout, name))
    return model


def open_store(folder: Path, slot_format: str) -> Store:
    """The experts of a checkpoint in this format, as a device reads them."""
    opened = open_headers(folder)
    return open_experts(opened.layers, opened.store, slot_format, CHUNK_BYTES, on_device=True)


def tensor_of(slot: torch.Tensor, layout: ExpertLayout, name: str) -> torch.Tensor:
    """One tensor of an expert in a slot in RAM, as the model has it."""
    spec = layout[name]
    content = slot[spec.offset_bytes : spec.end_bytes]
    return content.view(spec.dtype).view(spec.shape) if spec.format is None else spec.format.view(content).dense()
