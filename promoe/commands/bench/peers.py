"""Other software that serves a model whose experts do not fit in memory, on a CPU.

A peer's files are written once; then it is opened under a memory limit. Each peer has files of its own: what another one has
read is in the page cache.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from promoe.commands.bench.systems import Kind
from promoe.experts.adapters.base import set_tensor
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.files import read_json
from promoe.model.opening import open_without_experts
from promoe.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READY = "ready.json"  # is written last
MAX_SHARD_BYTES = 512 * 2**20


def prepare(kind: Kind, model: PreTrainedModel, checkpoint: Path, folder: Path) -> None:
    """Write the files that a peer reads weights from, unless they are there: as large as all experts, or as the model.

    Args:
        kind: the peer.
        model: the unmodified model, in memory.
        checkpoint: folder with its tokenizer.
        folder: for this peer alone; created.
    """
    mark = {"checkpoint": str(checkpoint.resolve()), "dtype": str(model.dtype), "kind": kind}
    ready = folder / READY
    if _read_mark(ready) != mark:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        {"page-cache": _write_raw, "disk-offload": _write_offloaded, "airllm": _write_stacked}[kind](
            model, checkpoint, folder
        )
        ready.write_text(json.dumps(mark))


def _read_mark(path: Path) -> Any:
    """Return what says whose files these are; None if they are not there, or half written."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def open_peer(kind: Kind, checkpoint: Path, dtype: torch.dtype, folder: Path) -> Any:
    """Return the model as this peer serves it; its `generate` answers."""
    if kind == "airllm":
        from airllm import AutoModel  # type: ignore[import-not-found,unused-ignore]

        return AutoModel.from_pretrained(str(folder), device="cpu", dtype=dtype)
    opened = open_without_experts(checkpoint, dtype=dtype)
    opened.store.close()
    for layer in opened.layers:
        (_map_experts if kind == "page-cache" else _offload_experts)(layer, folder)
    return opened.model.eval()


def _experts(model: nn.Module) -> Iterator[tuple[MoELayer, str, torch.Tensor]]:
    """Yield (layer, name of the parameter in its experts module, the parameter) of all routed experts."""
    for layer in find_moe_layers(model):
        for tensor in layer.tensors:
            for path in tensor.paths:
                yield layer, path, layer.experts.get_parameter(path).detach()


def _write_raw(model: nn.Module, checkpoint: Path, folder: Path) -> None:
    for layer, path, tensor in _experts(model):
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(folder / f"{layer.name}.{path}.bin")


def _map_experts(layer: MoELayer, folder: Path) -> None:
    """Map the files: the kernel reads what a product touches, reads ahead, and keeps it as long as there is room."""
    for tensor in layer.tensors:
        for path in tensor.paths:
            size = math.prod(tensor.stack_shape)
            mapped = torch.from_file(str(folder / f"{layer.name}.{path}.bin"), False, size, dtype=tensor.dtype)
            set_tensor(layer.experts, path, nn.Parameter(mapped.view(tensor.stack_shape), requires_grad=False))


def _write_offloaded(model: nn.Module, checkpoint: Path, folder: Path) -> None:
    from accelerate.utils import offload_state_dict

    for layer in find_moe_layers(model):
        offload_state_dict(folder / layer.name, layer.experts.state_dict())


def _offload_experts(layer: MoELayer, folder: Path) -> None:
    """Let accelerate load all experts of a layer when it runs, and drop them after it."""
    from accelerate import disk_offload

    for tensor in layer.tensors:
        for path in tensor.paths:
            empty = torch.empty(tensor.stack_shape, dtype=tensor.dtype, device="meta")
            set_tensor(layer.experts, path, nn.Parameter(empty, requires_grad=False))
    disk_offload(layer.experts, folder / layer.name, execution_device=torch.device("cpu"))


def _write_stacked(model: PreTrainedModel, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint in the layout of the model's own parameters: AirLLM does not stack the experts of the hub's layout."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        if sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.clone() for name, tensor in shard.items()}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model.config.save_pretrained(folder)
    load_tokenizer(str(checkpoint)).save_pretrained(folder)
    from airllm import AutoModel

    AutoModel.from_pretrained(str(folder), device="cpu", dtype=model.dtype)  # splits it in layers
