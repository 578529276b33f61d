"""Give the demo model experts of real size without changing its function.

    python examples/sharegpt_moe/widen.py examples/sharegpt_moe/checkpoint sharegpt-moe-wide --repeat 128

Every intermediate neuron of a routed expert is repeated r times and `down_proj` is divided by r: gate and up rows are
repeated, so each copy computes the same activation, and the r copies sum to the old contribution. Routing, attention
and everything else stay as they are. Written shard by shard in the layout of hub checkpoints, one tensor per expert and
projection, with at most one shard in memory.

What lies where: safetensors' writer sorts the tensors of a file by name, as on the hub, so an expert's down, gate and
up lie one after the other. The experts have shards of their own, and each file's header is padded to a multiple of 4096
bytes: experts whose tensors are multiples of 4096 bytes (the demo's are, from r = 4 on) are aligned for O_DIRECT.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from promoe.errors import PromoeError

INDEX = "model.safetensors.index.json"
MARKER = "widened.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

ALIGNMENT = 4096  # bytes; what O_DIRECT wants

_EXPERT = re.compile(
    r"\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight$"
)


class WidenError(PromoeError):
    """The source cannot be widened, or the destination cannot be written. The message says what to change."""


@dataclass(frozen=True)
class _Source:
    """A tensor of the small checkpoint: where it is, and its shape as saved."""

    file: Path
    shape: tuple[int, ...]


def widen(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    repeat: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 512 * 10**6,
    progress: bool = True,
) -> Path:
    """Write a checkpoint that computes what `source` computes, with `repeat` times wider routed experts.

    A destination that holds the result of the same call on the same source is returned as it is. Otherwise the files
    are written into a folder beside it, which is renamed when they are complete.

    Args:
        source: Folder with a Qwen2-MoE checkpoint (`config.json`, safetensors with one tensor per expert).
        destination: Folder to create. It must not exist, unless `widen` wrote it.
        repeat: Copies of each intermediate neuron. A power of two keeps the division exact in any floating dtype.
        dtype: `torch.bfloat16` or `torch.float32`.
        shard_bytes: Largest size of a shard's tensors; a single larger tensor gets its own shard. It is also about
            the memory needed.
        progress: Show a progress bar in bytes.

    Returns:
        The destination.

    Raises:
        WidenError: An argument is out of range, the source is not such a checkpoint, the destination exists with
            other contents, or the disk has too little room.
    """
    source, destination = Path(source), Path(destination)
    if repeat < 1:
        raise WidenError(f"The 'repeat' parameter of widen must be at least 1. Got {repeat} instead.")
    if dtype not in DTYPES.values():
        raise WidenError(f"The 'dtype' parameter of widen must be one of {', '.join(DTYPES)}. Got {dtype} instead.")
    if shard_bytes < 1:
        raise WidenError(f"The 'shard_bytes' parameter of widen must be positive. Got {shard_bytes} bytes instead.")
    tensors = _read_headers(source)
    marker = {
        "source_sha256": _digest(source),
        "repeat": repeat,
        "dtype": str(dtype).removeprefix("torch."),
        "shard_bytes": shard_bytes,
    }
    if destination.exists():
        _check_reusable(destination, marker)
        return destination
    shards = _plan_shards(tensors, repeat, dtype, shard_bytes)
    total = sum(_wide_bytes(name, tensors[name], repeat, dtype) for shard in shards for name in shard)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _check_room(destination.parent, total)

    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        os.chmod(partial, 0o755)  # mkdtemp makes it private
        _write_shards(partial, tensors, shards, repeat, dtype, total, progress)
        _write_config(source, partial, repeat, dtype)
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def _read_headers(source: Path) -> dict[str, _Source]:
    """Return place and shape of every tensor of the small checkpoint, by name."""
    if not (source / "config.json").is_file():
        raise WidenError(f"{source} has no config.json. Pass a checkpoint folder, for example one that train.py wrote.")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen2_moe":
        raise WidenError(f"widen knows qwen2_moe. {source} holds {config.get('model_type')!r} instead.")
    tensors: dict[str, _Source] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = _Source(file, tuple(opened.get_slice(name).get_shape()))
    if not any(_EXPERT.search(name) for name in tensors):
        raise WidenError(
            f"{source} holds no tensors named ...mlp.experts.<n>.gate_proj.weight in its {len(tensors)} tensors. "
            "Save the model with save_pretrained, which writes one tensor per expert."
        )
    return tensors


def _digest(source: Path) -> str:
    """Return the SHA-256 of names and contents of the files that the result depends on."""
    digest = hashlib.sha256()
    for file in sorted(path for path in source.iterdir() if path.suffix in {".json", ".safetensors", ".jinja"}):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _check_reusable(destination: Path, marker: dict[str, Any]) -> None:
    found: Any = None
    if (destination / MARKER).is_file():
        with contextlib.suppress(ValueError, RecursionError):  # damaged: not what was asked for
            found = json.loads((destination / MARKER).read_text(encoding="utf-8"))
    if found != marker:
        raise WidenError(
            f"{destination} exists and does not hold what was asked for: expected {marker}, found {found}. "
            "Delete it or choose another destination."
        )


def _check_room(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if total + (64 << 20) > free:
        raise WidenError(
            f"The widened checkpoint needs {total / 2**20:,.0f} MiB and {folder} has {free / 2**20:,.0f} MiB free. "
            "Free some space, choose another destination, or use a smaller repeat."
        )


def _wide_bytes(name: str, tensor: _Source, repeat: int, dtype: torch.dtype) -> int:
    factor = repeat if _EXPERT.search(name) else 1
    return torch.Size(tensor.shape).numel() * factor * dtype.itemsize


def _layout_order(name: str) -> tuple[int, int, str]:
    """Sort key: everything but the experts, then the experts by layer, number and name."""
    expert = _EXPERT.search(name)
    return (int(expert["layer"]), int(expert["expert"]), name) if expert else (-1, -1, name)


def _plan_shards(tensors: dict[str, _Source], repeat: int, dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Return the names per shard: first everything but the experts, then the experts, whole ones if one fits into a shard."""
    shards: list[list[str]] = []
    used, was_expert = 0, False
    for (layer, _, _), group in groupby(sorted(tensors, key=_layout_order), key=_unit):
        unit = list(group)
        size = sum(_wide_bytes(name, tensors[name], repeat, dtype) for name in unit)
        is_expert = layer >= 0
        if not shards or is_expert != was_expert or used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1] += unit
        used, was_expert = used + size, is_expert
    return shards


def _unit(name: str) -> tuple[int, int, str]:
    """Return the unit that must stay in one file: an expert with its three tensors, or any other tensor by itself."""
    layer, expert, _ = _layout_order(name)
    return layer, expert, "" if layer >= 0 else name


def _widened(name: str, tensor: Tensor, repeat: int, dtype: torch.dtype) -> Tensor:
    expert = _EXPERT.search(name)
    if not expert:
        return tensor.to(dtype).contiguous()
    if expert["projection"] == "down":
        return (tensor.float() / repeat).to(dtype).repeat_interleave(repeat, dim=1)
    return tensor.to(dtype).repeat_interleave(repeat, dim=0)


def _write_shards(
    folder: Path,
    tensors: dict[str, _Source],
    shards: list[list[str]],
    repeat: int,
    dtype: torch.dtype,
    total: int,
    progress: bool,
) -> None:
    """Write every shard and the index that names them."""
    weight_map: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="widening", disable=not progress) as bar:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            shard: dict[str, Tensor] = {}
            with ExitStack() as stack:
                opened = {
                    path: stack.enter_context(safe_open(path, framework="pt"))
                    for path in {tensors[name].file for name in names}
                }
                for name in names:
                    shard[name] = _widened(name, opened[tensors[name].file].get_tensor(name), repeat, dtype)
            save_file(shard, folder / file, metadata=_padded_metadata(shard))
            weight_map |= dict.fromkeys(names, file)
            bar.update(sum(tensor.nbytes for tensor in shard.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _padded_metadata(shard: dict[str, Tensor]) -> dict[str, str]:
    """Metadata that makes safetensors' header (8 bytes of length, then JSON) end at a multiple of `ALIGNMENT`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "padding": ""}}
    offset = 0
    for name, tensor in sorted(shard.items()):
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    length = 8 + len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return {"format": "pt", "padding": " " * (-length % ALIGNMENT)}


def _write_config(source: Path, folder: Path, repeat: int, dtype: torch.dtype) -> None:
    """Copy tokenizer and the like as they are; write the config with the new width and dtype."""
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in {"config.json", "README.md", INDEX}:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["moe_intermediate_size"] *= repeat
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Command line of `widen`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the small checkpoint's folder")
    parser.add_argument("destination", type=Path, help="folder to create")
    parser.add_argument("--repeat", type=int, default=128, help="copies of each intermediate neuron (default: 128)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--shard-bytes", type=int, default=512 * 10**6, help="largest shard in bytes (default: 512 MB)")
    options = parser.parse_args(arguments)
    try:
        widen(options.source, options.destination, options.repeat, DTYPES[options.dtype], options.shard_bytes)
    except WidenError as error:
        parser.exit(1, f"widen: {error}\n")


if __name__ == "__main__":
    main()
