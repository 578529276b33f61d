"""Files of experts in a slot format: written once from a checkpoint (`promoe pack`), and opened together with it.

A folder has one safetensors file for each MoE layer. Its only tensor, `slots[E, slot_bytes]`, holds each expert as it
lies in a slot. The folder's `packed.json` names the files that the experts came from, their format, and the layout of
each matrix. It is written last: a folder without it does not count as packed.
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
from promoe.experts.kernels.formats import FORMATS, Formats, SlotFormat, formats_in, formats_of
from promoe.experts.moe_layers import MoELayer
from promoe.files import read_json
from promoe.model.file_tensors import Progress
from promoe.scheduler import ExpertKey
from promoe.stores.base import read_expert
from promoe.stores.layout import ExpertLayout
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_store import SafetensorsStore
from promoe.stores.slot_files import SlotFilesStore, header_of, layer_path, write_layer
from promoe.stores.slot_format import MatrixFormat
from promoe.units import format_memory

logger = logging.getLogger(__name__)

FOLDER, INDEX, FORMAT = "promoe-packed", "packed.json", 2
PackedChoice = str | os.PathLike[str] | Literal["auto"] | None
DEFAULT_FORMAT = "packed"  # also that of an index that names none
# A smaller gain could be noise in the measured times.
LEAST_GAIN = 1.05


def packed_folder(store: SafetensorsStore) -> Path:
    """Return the default folder of packed experts, which is beside the checkpoint's files."""
    return store.files[0].path.parent / FOLDER


def packable(layers: Sequence[MoELayer], store: SafetensorsStore) -> Formats:
    """Return what `write_packed` would pack; nothing if it would raise, or if the experts are packed already."""
    if formats_in(store.layouts):
        return {}
    try:
        return _worth_packing(layers, store, FORMATS[DEFAULT_FORMAT])
    except UnsupportedModelError:
        return {}


def write_packed(
    layers: Sequence[MoELayer],
    store: SafetensorsStore,
    folder: Path,
    progress: Progress | None = None,
    slot_format: str = DEFAULT_FORMAT,
) -> int:
    """Pack the experts of a checkpoint into `folder`, and replace what was packed there before.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint's experts.
        folder: created if it does not exist.
        progress: called as `progress(done_bytes, total_bytes)`.
        slot_format: a key of `FORMATS`.

    Returns:
        The number of bytes written.

    Raises:
        UnsupportedModelError: no matrix of this model can be packed on this machine, or packing makes none faster.
        ConfigError: there is too little disk space, or the folder cannot be written.
        CheckpointError: an expert cannot be read.
    """
    try:
        formats = _worth_packing(layers, store, FORMATS[slot_format])
    except UnsupportedModelError as error:
        if (folder / INDEX).is_file():
            raise UnsupportedModelError(
                f"{error} The experts that were packed into {folder} before are still used: delete that folder."
            ) from error
        raise
    layouts = _layouts(layers, formats)
    sizes = [layer.num_experts * layout.slot_bytes for layer, layout in zip(layers, layouts, strict=True)]
    index, paths = _index(layers, layouts, store, slot_format), _paths(layers, folder)
    digest = _digest(index)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, sum(sizes), paths)
        (folder / INDEX).unlink(missing_ok=True)
        try:
            for layer, layout, path, done_bytes in zip(layers, layouts, paths, accumulate(sizes), strict=True):
                write_layer(path, _header(layer, layout, digest), _packed_slots(layer, layout, store))
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


def _worth_packing(layers: Sequence[MoELayer], store: SafetensorsStore, slot_format: SlotFormat) -> Formats:
    possible = formats_of(layers, slot_format)
    if not any(possible.values()):
        raise UnsupportedModelError(
            "No expert of this model can be packed on this machine. Packing needs matrices in bfloat16 of at most 64 MiB whose "
            "sizes are multiples of 64, experts that run with experts_implementation='grouped_mm', and a processor and build "
            "of torch whose oneDNN has its own layout for matrices and computes one token's row with the same bits. Found "
            f"{_properties(layers)}. Run the model without packing."
        )
    _check_stored(layers, _layouts(layers, possible), store)
    found = {
        layout: {name: matrix for name, matrix in matrices.items() if slot_format.gain(matrix) >= LEAST_GAIN}
        for layout, matrices in possible.items()
    }
    if not any(found.values()):
        raise UnsupportedModelError(
            "Packing this model's experts gains nothing on this machine. Measured speedup of one token's product by packed "
            f"matrices: {gains_in_words(possible, slot_format.name)}; packing is worth it from {LEAST_GAIN} on. "
            f"Found {_properties(layers)}. Run the model without packing."
        )
    return {layout: matrices for layout, matrices in found.items() if matrices}


def gains_in_words(formats: Formats, slot_format: str = DEFAULT_FORMAT) -> str:
    """Return the speedup of the products by each packed tensor, as text."""
    gain = FORMATS[slot_format].gain
    gains = {(name, gain(matrix)) for matrices in formats.values() for name, matrix in matrices.items()}
    return ", ".join(f"{name} {times:.2f}" for name, times in sorted(gains))


def open_packed(
    layers: Sequence[MoELayer], store: SafetensorsStore, choice: PackedChoice, chunk_bytes: int
) -> SafetensorsStore:
    """Return a store of the packed experts of `store`, which then owns `store`; or `store` itself if none are used.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint.
        choice: the folder of packed experts. "auto": the one beside the checkpoint, if there is one and it fits. None:
            use no packed experts.
        chunk_bytes: longest chunk.

    Raises:
        ConfigError: the folder given as `choice` has no packed experts that fit this checkpoint, machine and dtype.
    """
    if choice is None:
        return store
    folder = packed_folder(store) if choice == "auto" else Path(choice)
    if not (folder / INDEX).is_file():
        if choice == "auto":
            return store
        raise ConfigError(
            f"packed={shown(str(choice))} is not a folder of packed experts: it has no {INDEX}. Write one with `promoe pack "
            "MODEL --out FOLDER`, or open the model with packed=None (--packed none), which reads the checkpoint's own files."
        )
    try:
        return _open(layers, store, folder, chunk_bytes)
    # Torch raises RuntimeError if there is too little memory.
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        message = (
            f"The packed experts in {folder} cannot be used: {str(error).removesuffix('.')}. Pack them again (promoe pack), or "
            "open the model with packed=None."
        )
        if choice != "auto":
            raise ConfigError(message) from error
        logger.warning("%s The checkpoint's own files are read instead.", message)
        return store


def _open(layers: Sequence[MoELayer], store: SafetensorsStore, folder: Path, chunk_bytes: int) -> SlotFilesStore:
    index = read_json(folder / INDEX)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{INDEX} is not in format {FORMAT}.")
    slot_format = index.get("slot_format", DEFAULT_FORMAT)
    if slot_format not in FORMATS:
        raise ValueError(f"They are in the slot format {shown(slot_format)}, which this version does not know.")
    layouts = _layouts(layers, _named(formats_of(layers, FORMATS[slot_format]), layers, index))
    expected = _index(layers, layouts, store, slot_format)
    for key, what in _DIFFERENCES.items():
        if index.get(key) != expected[key]:
            raise ValueError(f"They are of {what}.")
    digest = _digest(expected)
    files = SafetensorsFiles.open(_paths(layers, folder))
    try:
        for layer, layout, file in zip(layers, layouts, files.files, strict=True):
            if file.fingerprint.header_crc != zlib.crc32(_header(layer, layout, digest)):
                raise ValueError(f"{file.path.name} does not belong to the packing that {INDEX} describes.")
        return SlotFilesStore(files, layouts, store.num_experts, chunk_bytes, source=store)
    except BaseException:
        files.close()
        raise


def _named(possible: Formats, layers: Sequence[MoELayer], index: Mapping[str, Any]) -> Formats:
    """Return the part of `possible` that the index names."""
    entries = index.get("packings")
    if not isinstance(entries, list) or len(entries) != len(layers) or not all(isinstance(e, dict) for e in entries):
        return possible
    named = {layer.layout: entry for layer, entry in zip(layers, entries, strict=True)}
    return {
        layout: {name: matrix for name, matrix in matrices.items() if name in named[layout]}
        for layout, matrices in possible.items()
    }


def _layouts(layers: Sequence[MoELayer], formats: Formats) -> list[ExpertLayout]:
    """Return how an expert of each layer lies in its slot."""
    return [layer.layout.in_formats(formats.get(layer.layout, {})) for layer in layers]


# For each entry of the index: what is different if the entry is.
_DIFFERENCES = {
    "checkpoint": "other files, or the checkpoint was written since",
    "layers": "another model, or another dtype",
    "packings": "another processor, number of threads, version of torch or experts implementation: other matrices can be "
    "packed, or in another layout",
}


def _index(
    layers: Sequence[MoELayer], layouts: Sequence[ExpertLayout], store: SafetensorsStore, slot_format: str
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "slot_format": slot_format,
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
        "layers": [
            _layer_entry(layer.name, layer.num_experts, layout) for layer, layout in zip(layers, layouts, strict=True)
        ],
        "packings": [{name: matrix.signature for name, matrix in layout.formats.items()} for layout in layouts],
    }


def _layer_entry(name: str, num_experts: int, layout: ExpertLayout) -> dict[str, Any]:
    tensors = [[spec.name, list(spec.shape), str(spec.dtype), spec.offset_bytes] for spec in layout.tensors]
    return {"name": name, "num_experts": num_experts, "slot_bytes": layout.slot_bytes, "tensors": tensors}


def _paths(layers: Sequence[MoELayer], folder: Path) -> list[Path]:
    return [layer_path(folder, layer.layer_idx) for layer in layers]


def _digest(index: Mapping[str, Any]) -> str:
    """Return a checksum of what was packed."""
    what = json.dumps({key: index[key] for key in _DIFFERENCES}, sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _header(layer: MoELayer, layout: ExpertLayout, digest: str) -> bytes:
    """Return the header of a layer's file. Its checksum tells the files of two packings in one folder apart."""
    return header_of({"layer": layer.name, "sha256": digest}, layer.num_experts, layout)


def _properties(layers: Sequence[MoELayer]) -> str:
    """Return the properties of the model and of torch that packing depends on, as text."""
    matrices = {
        f"{spec.name} {' x '.join(map(str, spec.shape))} in {str(spec.dtype).removeprefix('torch.')}": None
        for layer in layers
        for spec in layer.layout.tensors
        if len(spec.shape) == 2
    }
    how = sorted({layer.implementation for layer in layers})
    return f"{', '.join(matrices)}; {' and '.join(how)}; torch with {torch.backends.cpu.get_cpu_capability()}"


def _check_stored(layers: Sequence[MoELayer], layouts: Sequence[ExpertLayout], store: SafetensorsStore) -> None:
    """Raise UnsupportedModelError if packed experts would be larger than they are in the checkpoint."""
    for layer, layout in zip(layers, layouts, strict=True):
        stored_bytes = sum(chunk.source_nbytes for chunk in store.chunks(ExpertKey(layer.layer_idx, 0)))
        if stored_bytes < layout.payload_bytes:
            raise UnsupportedModelError(
                f"The experts of {layer.name!r} take {format_memory(stored_bytes)} each in the checkpoint (in fewer bits), and "
                f"would take {format_memory(layout.payload_bytes)} packed. Reading them would take longer than packing "
                "saves. Run the model without packing."
            )


def _check_room(folder: Path, nbytes: int, replaced: Sequence[Path]) -> None:
    free_bytes = shutil.disk_usage(folder).free
    free_bytes += sum(path.stat().st_size for path in replaced if path.is_file())
    if nbytes > free_bytes:
        raise ConfigError(
            f"Packed experts take {format_memory(nbytes)}, but {folder} has only {format_memory(free_bytes)} free. Free some "
            "space, or choose another folder with --out."
        )


def _packed_slots(layer: MoELayer, layout: ExpertLayout, store: SafetensorsStore) -> Iterator[bytearray]:
    """Yield each expert of a layer as it lies in a slot of `layout`; the next one overwrites it."""
    plain, packed = bytearray(layer.layout.slot_bytes), bytearray(layout.slot_bytes)
    for expert_idx in range(layer.num_experts):
        _read(store, ExpertKey(layer.layer_idx, expert_idx), plain)
        for spec, target in zip(layer.layout.tensors, layout.tensors, strict=True):
            if target.format is None:
                packed[target.offset_bytes : target.end_bytes] = memoryview(plain)[spec.offset_bytes : spec.end_bytes]
                continue
            count = spec.nbytes // spec.dtype.itemsize
            matrix = torch.frombuffer(plain, dtype=spec.dtype, count=count, offset=spec.offset_bytes).view(spec.shape)
            packed[target.offset_bytes : target.end_bytes] = _pack(spec.name, matrix, target.format)
        yield packed


def _read(store: SafetensorsStore, key: ExpertKey, slot: bytearray) -> None:
    try:
        read_expert(store, key, memoryview(slot))
    except OSError as error:
        raise CheckpointError(
            f"Expert {key.expert_idx} of MoE layer {key.layer_idx} could not be read: {error}. Nothing was packed. Remove the "
            "cause and try again."
        ) from error


def _pack(name: str, matrix: torch.Tensor, matrix_format: MatrixFormat) -> memoryview:
    packed = matrix_format.pack(matrix)
    if not torch.equal(matrix_format.view(packed).dense().view(torch.int16), matrix.view(torch.int16)):
        raise UnsupportedModelError(
            f"{name} {list(matrix.shape)} changes on this machine when it is packed and unpacked. This is a fault of this "
            f"version of torch ({torch.__version__}). Run the model without packing."
        )
    return packed.numpy().data


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
