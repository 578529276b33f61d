"""Other software that serves a model whose experts do not fit in memory, on a CPU.

A peer's files are written once; then it is opened under a memory limit. Each peer has files of its own: what another one has
read is in the page cache.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from promoe.commands.bench.gguf_writer import computes_alike, write_gguf
from promoe.commands.bench.llama_cpp import LlamaCpp
from promoe.commands.bench.systems import Kind, System, require_gguf
from promoe.experts.adapters.base import set_tensor
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.files import read_json
from promoe.model.opening import open_without_experts
from promoe.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READY = "ready.json"  # is written last
MAX_SHARD_BYTES = 512 * 2**20
GGUF = "model.gguf"


def prepare(system: System, model: PreTrainedModel, checkpoint: Path, folder: Path) -> None:
    """Write the files that a peer reads weights from, unless they are there: as large as all experts, or as the model.

    Args:
        system: the peer.
        model: the unmodified model, in memory.
        checkpoint: folder with its tokenizer.
        folder: for this peer alone; created.
    """
    if system.is_llama_cpp:
        prepare_gguf(system.experts, model.dtype, checkpoint, folder)
        return
    mark = {"checkpoint": str(checkpoint.resolve()), "dtype": str(model.dtype), "kind": system.kind}
    write = {"page-cache": _write_raw, "disk-offload": _write_offloaded, "airllm": _write_stacked}[system.kind]
    _write_once(folder, mark, lambda: write(model, checkpoint, folder))


def prepare_gguf(gguf_type: str, dtype: torch.dtype, checkpoint: Path, folder: Path) -> Path:
    """Write a model as a GGUF file into a folder, unless it is there. Return the file."""
    path = folder / GGUF
    mark = {"checkpoint": str(checkpoint.resolve()), "dtype": str(dtype), "type": gguf_type}
    _write_once(folder, mark, lambda: write_gguf(checkpoint, path, gguf_type, dtype))
    return path


def _write_once(folder: Path, mark: dict[str, str], write: Callable[[], None]) -> None:
    """Write files into an empty folder, and then what says whose they are, unless that is there."""
    ready = folder / READY
    if _read_mark(ready) != mark:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write()
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


def note_on_gguf(system: System, checkpoint: Path) -> str:
    """Say how what a system computes from a GGUF file differs from the model; empty: it does not, but for rounding.

    Raises:
        ConfigError: a package is not installed, or no file is written for this family.
    """
    from transformers import AutoConfig

    require_gguf(system)
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    if computes_alike(config):
        return ""
    return (
        f"; what is in GGUF files of this family {'never' if config.norm_topk_prob else 'always'} divides the weights of a "
        "token's experts by their sum, unlike this model: compare the times, and tokens only among such systems"
    )


def open_llama_cpp(system: System, checkpoint: Path, folder: Path, context_tokens: int) -> LlamaCpp:
    """Return llama.cpp with the file in `folder`. It never ends an answer before it is as long as was asked for."""
    path, repack = folder / GGUF, system.kind != "llama-cpp-no-repack"
    return LlamaCpp(path, context_tokens, torch.get_num_threads(), repack=repack, banned=_end_tokens(checkpoint))


def _end_tokens(checkpoint: Path) -> list[int]:
    """Return the ids that end an answer, as `model.generate` of the unmodified model knows them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    except OSError:  # there is no generation_config.json
        found = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False).get_text_config().eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


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
