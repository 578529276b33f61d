"""Packed experts in files: written once from a checkpoint (`promoe pack`), opened beside it.

A folder has one safetensors file per MoE layer, whose only tensor `slots[E, slot_bytes]` holds each expert as it lies in a
slot, and `packed.json`, which says of what files, and in which layout. It is written last: without it there is nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from promoe.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from promoe.experts.kernels import packed_gain
from promoe.experts.kernels.packed import Packing
from promoe.experts.kernels.packed_store import NO_PACKINGS, PackedStore, Packings, packings_in
from promoe.experts.moe_layers import MoELayer
from promoe.files import read_json
from promoe.model.file_tensors import Progress
from promoe.scheduler import ExpertKey
from promoe.stores.base import read_expert
from promoe.stores.layout import ExpertLayout
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_store import SafetensorsStore
from promoe.stores.slot_files import header_of, layer_path, write_layer
from promoe.units import format_memory

logger = logging.getLogger(__name__)

FOLDER, INDEX, FORMAT = "promoe-packed", "packed.json", 2
PackedChoice = str | os.PathLike[str] | Literal["auto"] | None
# Only of these are matrices multiplied here, not by the model's own code.
IMPLEMENTATION = "grouped_mm"


def packed_folder(store: SafetensorsStore) -> Path:
    """Where packed experts are, if nothing else was said: beside the checkpoint's files."""
    return store.files[0].path.parent / FOLDER


def packings_of(layers: Sequence[MoELayer]) -> Packings:
    """Of each layout, the tensors that can be packed on this machine, by name, and how."""
    return {layer.layout: _packings_of_layer(layer) for layer in layers}


def _packings_of_layer(layer: MoELayer) -> dict[str, Packing]:
    experts: Any = layer.experts
    if not layer.adapter.sums_rows or layer.implementation != IMPLEMENTATION:
        return {}
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    found = {
        spec.name: Packing.of(spec.shape, experts.is_transposed, spec.dtype)
        for spec in layer.layout.tensors
        if spec.name in names
    }
    return {name: packing for name, packing in found.items() if packing is not None}


def packable(layers: Sequence[MoELayer], store: SafetensorsStore) -> Packings:
    """What `write_packed` would pack of a checkpoint; nothing where it would refuse to, and where that is done."""
    if packings_in(store):
        return NO_PACKINGS
    try:
        return _worth_packing(layers, store)
    except UnsupportedModelError:
        return NO_PACKINGS


def write_packed(
    layers: Sequence[MoELayer], store: SafetensorsStore, folder: Path, progress: Progress | None = None
) -> int:
    """Pack the experts of a checkpoint into `folder`, in place of what was packed there.

    Args:
        layers: of the model.
        store: its experts.
        folder: made if it is not there.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        Bytes written.

    Raises:
        UnsupportedModelError: no matrix of this model can be packed on this machine, or none is multiplied by sooner then.
        ConfigError: there is too little room, or the folder cannot be written.
        CheckpointError: an expert cannot be read.
    """
    try:
        packings = _worth_packing(layers, store)
    except UnsupportedModelError as error:
        if (folder / INDEX).is_file():
            raise UnsupportedModelError(
                f"{error} What was packed into {folder} before is still used: delete it."
            ) from error
        raise
    sizes = [layer.num_experts * layer.layout.slot_bytes for layer in layers]
    index, paths = _index(layers, store, packings), _paths(layers, folder)
    digest = _digest(index)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, sum(sizes), paths)
        (folder / INDEX).unlink(missing_ok=True)
        try:
            for layer, path, done_bytes in zip(layers, paths, accumulate(sizes), strict=True):
                write_layer(path, _header(layer, digest), _packed_slots(layer, store, packings.get(layer.layout, {})))
                if progress is not None:
                    progress(done_bytes, sum(sizes))
            _write_whole(folder / INDEX, json.dumps(index, indent=1).encode())
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"Experts could not be packed into {folder}: {error}. Choose another folder with --out."
        ) from error
    return sum(sizes)


def _worth_packing(layers: Sequence[MoELayer], store: SafetensorsStore) -> Packings:
    possible = packings_of(layers)
    if not any(possible.values()):
        raise UnsupportedModelError(
            "No expert of this model can be packed on this machine: that takes matrices in bfloat16 of at most 64 MiB, their "
            "sizes multiples of 64, experts that run with experts_implementation='grouped_mm', and a processor and a build of "
            f"torch for whose oneDNN matrices have a layout of their own, in which one token's row has the same bits. Found "
            f"{_found(layers)}. Run the model as it is."
        )
    _check_stored(layers, store)
    found = packed_gain.gaining(possible)
    if not found:
        raise UnsupportedModelError(
            "Nothing is gained by packing this model's experts on this machine. One token's row is multiplied so many times as "
            f"fast by packed matrices (measured): {packed_gain.in_words(possible)}; it takes at least {packed_gain.LEAST_GAIN} "
            f"times to be worth it. Found {_found(layers)}. Run the model as it is."
        )
    return found


def open_packed(
    layers: Sequence[MoELayer], store: SafetensorsStore, choice: PackedChoice, chunk_bytes: int
) -> SafetensorsStore:
    """The packed experts of `store`, which they take over; or `store` itself.

    Args:
        layers: of the model.
        store: the checkpoint.
        choice: the folder of packed experts; "auto": that beside the checkpoint, if there is one and it fits; None: none.
        chunk_bytes: longest chunk.

    Raises:
        ConfigError: the folder that was named has none that fit this checkpoint, machine and dtype.
    """
    if choice is None:
        return store
    folder = packed_folder(store) if choice == "auto" else Path(choice)
    if not (folder / INDEX).is_file():
        if choice == "auto":
            return store
        raise ConfigError(
            f"packed={shown(str(choice))} is no folder of packed experts: it has no {INDEX}. Write one with `promoe pack MODEL "
            "--out FOLDER`, or open the model with packed=None (--packed none), which reads the checkpoint's own files."
        )
    try:
        return _open(layers, store, folder, chunk_bytes)
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:  # torch says so that there is no memory
        message = (
            f"The packed experts in {folder} cannot be used: {str(error).removesuffix('.')}. Pack them again (promoe pack), or "
            "open the model with packed=None."
        )
        if choice != "auto":
            raise ConfigError(message) from error
        logger.warning("%s The checkpoint's own files are read.", message)
        return store


def _open(layers: Sequence[MoELayer], store: SafetensorsStore, folder: Path, chunk_bytes: int) -> PackedStore:
    index = read_json(folder / INDEX)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{INDEX} is not in format {FORMAT}.")
    packings = _of_index(packings_of(layers), layers, index)
    expected = _index(layers, store, packings)
    for key, what in _WHAT.items():
        if index.get(key) != expected[key]:
            raise ValueError(f"They are of {what}.")
    digest = _digest(expected)
    files = SafetensorsFiles.open(_paths(layers, folder))
    try:
        for layer, file in zip(layers, files.files, strict=True):
            if file.fingerprint.header_crc != zlib.crc32(_header(layer, digest)):
                raise ValueError(f"{file.path.name} is not of the packing that {INDEX} describes.")
        return PackedStore(files, store, packings, chunk_bytes)
    except BaseException:
        files.close()
        raise


def _of_index(possible: Packings, layers: Sequence[MoELayer], index: Mapping[str, Any]) -> Packings:
    """Of what can be packed here, what the index names."""
    entries = index.get("packings")
    if not isinstance(entries, list) or len(entries) != len(layers) or not all(isinstance(e, dict) for e in entries):
        return possible
    named = {layer.layout: entry for layer, entry in zip(layers, entries, strict=True)}
    return {
        layout: {name: packing for name, packing in packings.items() if name in named[layout]}
        for layout, packings in possible.items()
    }


# What differs if an entry of the index does.
_WHAT = {
    "checkpoint": "other files, or the checkpoint was written since",
    "layers": "another model, or another dtype",
    "packings": "another processor, number of threads, version of torch or experts implementation: other matrices can be "
    "packed, or in another layout",
}


def _index(layers: Sequence[MoELayer], store: SafetensorsStore, packings: Packings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "checkpoint": [
            {
                "name": file.path.name,
                "size_bytes": file.fingerprint.size_bytes,
                "header_crc": file.fingerprint.header_crc,
                "samples_crc": file.fingerprint.samples_crc,
            }
            for file in store.files
        ],
        "layers": [_layer_entry(layer.name, layer.num_experts, layer.layout) for layer in layers],
        "packings": [_packing_entry(packings.get(layer.layout, {})) for layer in layers],
    }


def _layer_entry(name: str, num_experts: int, layout: ExpertLayout) -> dict[str, Any]:
    tensors = [[spec.name, list(spec.shape), str(spec.dtype), spec.offset_bytes] for spec in layout.tensors]
    return {"name": name, "num_experts": num_experts, "slot_bytes": layout.slot_bytes, "tensors": tensors}


def _packing_entry(packings: Mapping[str, Packing]) -> dict[str, str]:
    return {name: packing.signature for name, packing in packings.items()}


def _paths(layers: Sequence[MoELayer], folder: Path) -> list[Path]:
    return [layer_path(folder, layer.layer_idx) for layer in layers]


def _digest(index: Mapping[str, Any]) -> str:
    """Of what was packed."""
    what = json.dumps({key: index[key] for key in _WHAT}, sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _header(layer: MoELayer, digest: str) -> bytes:
    """How a layer's file begins. It names what was packed: files of two packings in one folder are told apart."""
    return header_of({"layer": layer.name, "sha256": digest}, layer.num_experts, layer.layout)


def _found(layers: Sequence[MoELayer]) -> str:
    """What packing goes by, in words."""
    matrices = {
        f"{spec.name} {' x '.join(map(str, spec.shape))} in {str(spec.dtype).removeprefix('torch.')}": None
        for layer in layers
        for spec in layer.layout.tensors
        if len(spec.shape) == 2
    }
    how = sorted({layer.implementation for layer in layers})
    return f"{', '.join(matrices)}; {' and '.join(how)}; torch with {torch.backends.cpu.get_cpu_capability()}"


def _check_stored(layers: Sequence[MoELayer], store: SafetensorsStore) -> None:
    """Refuse what would have to be read in more bytes than now."""
    for layer in layers:
        stored_bytes = sum(chunk.source_nbytes for chunk in store.chunks(ExpertKey(layer.layer_idx, 0)))
        if stored_bytes < layer.layout.payload_bytes:
            raise UnsupportedModelError(
                f"The experts of {layer.name!r} are stored in {format_memory(stored_bytes)} each (in fewer bits), and would "
                f"take {format_memory(layer.layout.payload_bytes)} packed: reading them would take longer than packing "
                "saves. Run the model as it is."
            )


def _check_room(folder: Path, nbytes: int, replaced: Sequence[Path]) -> None:
    free_bytes = shutil.disk_usage(folder).free
    free_bytes += sum(path.stat().st_size for path in replaced if path.is_file())
    if nbytes > free_bytes:
        raise ConfigError(
            f"Packed experts take {format_memory(nbytes)}; {format_memory(free_bytes)} are free in {folder}. Free some, or "
            "choose another folder with --out."
        )


def _packed_slots(layer: MoELayer, store: SafetensorsStore, packings: Mapping[str, Packing]) -> Iterator[bytearray]:
    slot = bytearray(layer.layout.slot_bytes)
    for expert_idx in range(layer.num_experts):
        _read(store, ExpertKey(layer.layer_idx, expert_idx), slot)
        _pack_in_place(slot, layer.layout, packings)
        yield slot


def _read(store: SafetensorsStore, key: ExpertKey, slot: bytearray) -> None:
    try:
        read_expert(store, key, memoryview(slot))
    except OSError as error:
        raise CheckpointError(
            f"Expert {key.expert_idx} of MoE layer {key.layer_idx} could not be read: {error}. Nothing is packed now; mend the "
            "cause and try again."
        ) from error


def _pack_in_place(slot: bytearray, layout: ExpertLayout, packings: Mapping[str, Packing]) -> None:
    for name, packing in packings.items():
        spec = layout[name]
        count = spec.nbytes // spec.dtype.itemsize
        matrix = torch.frombuffer(slot, dtype=spec.dtype, count=count, offset=spec.offset_bytes).view(spec.shape)
        packed = packing.pack(matrix)
        if not torch.equal(packing.view(packed).dense().view(torch.int16), matrix.view(torch.int16)):
            raise UnsupportedModelError(
                f"{name} {list(spec.shape)}, packed and unpacked, is another matrix on this machine: a fault of this version "
                f"of torch ({torch.__version__}). Run the model as it is."
            )
        slot[spec.offset_bytes : spec.end_bytes] = packed.numpy().data


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
