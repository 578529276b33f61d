"""Folders of experts in a slot format: written once from a checkpoint, and opened together with it.

A folder has one safetensors file for each MoE layer, which holds each expert as it lies in a slot
(`promoe.stores.slot_files`). The folder's `experts.json` (`slot_index`) names the files that the experts came from and
the format of each matrix. It is written last: a folder without it cannot be opened. `experts.json.part` is written
first: with it, writing goes on after an interruption, layer by layer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from promoe.errors import CheckpointError, ConfigError, shown
from promoe.experts.kernels.formats import FORMATS, QUANTIZED, Formats, matrices
from promoe.experts.moe_layers import MoELayer
from promoe.files import read_json
from promoe.model.file_tensors import Progress
from promoe.model.relaying import relaid_store
from promoe.model.slot_index import DIFFERENCES, INDEX, Forms, HotFormats, digest_of, forms_in, index_of
from promoe.scheduler import ExpertKey
from promoe.stores.base import Store, read_expert
from promoe.stores.file_store import FileStore
from promoe.stores.gguf_parts import stem_of
from promoe.stores.layout import ExpertLayout
from promoe.stores.slot_files import SlotFilesStore, layer_path, write_layer
from promoe.stores.slot_format import MatrixFormat
from promoe.stores.tensor_files import TensorFiles
from promoe.units import format_memory

logger = logging.getLogger(__name__)

# The name of a quantised form in which the most used experts have more bits, such as "int4-hot8".
MIXED = re.compile(r"int([432])-hot([843])")
# "auto", "checkpoint", the name of a slot format or of a mixed form, or a folder.
ExpertsChoice: TypeAlias = "str | os.PathLike[str]"
# Takes a layer, a tensor's name, the matrix and its format; returns the bytes.
Encode: TypeAlias = Callable[[MoELayer, str, torch.Tensor, MatrixFormat], torch.Tensor]


def default_folder(store: FileStore, slot_format: str) -> Path:
    """Return the folder in which experts in a slot format are looked for: beside the checkpoint's files.

    It is promoe-int4, for example. Beside a GGUF file it has the file's name too, because a folder may have several
    models: model-Q8_0.promoe-int4.
    """
    file = store.files[0]
    prefix = f"{stem_of(file.path.name)}." if file.metadata is not None else ""
    return file.path.parent / f"{prefix}promoe-{slot_format}"


def command_for(slot_format: str) -> str:
    """Return the command that writes experts in this slot format, or in this mixed form."""
    if mixed := MIXED.fullmatch(slot_format):
        return f"promoe quantize MODEL --bits {mixed[1]} --hot {mixed[2]} --counts FILE"
    return "promoe pack MODEL" if FORMATS[slot_format].exact else f"promoe quantize MODEL --bits {slot_format[3:]}"


def write_slots(
    layers: Sequence[MoELayer],
    store: FileStore,
    folder: Path,
    formats: Formats,
    encode: Encode,
    method: str,
    progress: Progress | None = None,
    hot: HotFormats | None = None,
) -> int:
    """Write the experts of a checkpoint into `folder`, and replace those that were there before.

    Memory is bounded by two experts. After an error or Ctrl-C, finished layers stay, and the same call goes on with the
    next one.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint's experts.
        folder: created if it does not exist.
        formats: of the matrices of each layout.
        encode: returns a matrix in its format.
        method: how `encode` does it. Layers that were written by another method are not kept.
        progress: called as `progress(done_bytes, total_bytes)` after each layer.
        hot: experts that are to have other formats.

    Returns:
        The number of bytes of all experts in the folder.

    Raises:
        ConfigError: there is too little disk space, or the folder cannot be written.
        CheckpointError: an expert cannot be read.
    """
    forms = Forms.of(layers, formats, hot)
    begun = _begun(layers, store, folder, method, forms)
    forms = begun or forms
    sizes = [forms.nbytes(layer) for layer in layers]
    index, paths = index_of(layers, forms, store, method), _paths(layers, folder)
    digest = digest_of(index)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, sum(sizes), paths)
        if begun is None:
            for path in (folder / INDEX, *paths):
                path.unlink(missing_ok=True)
            _write_whole(_part(folder), index)
        for layer, path, done_bytes in zip(layers, paths, accumulate(sizes), strict=True):
            if not path.is_file():
                slots = (slots_of(layer, layout, store, encode, experts) for layout, experts in forms.in_file(layer))
                write_layer(path, forms.header(layer, digest), chain.from_iterable(slots))
            if progress is not None:
                progress(done_bytes, sum(sizes))
        _write_whole(folder / INDEX, index)
        _part(folder).unlink()
    except OSError as error:
        raise ConfigError(
            f"Experts could not be written into {folder}: {error}. Choose another folder with --out."
        ) from error
    return sum(sizes)


def _part(folder: Path) -> Path:
    return folder / f"{INDEX}.part"


def _begun(layers: Sequence[MoELayer], store: FileStore, folder: Path, method: str, forms: Forms) -> Forms | None:
    """Return the forms of an interrupted call that can go on; None: there is none, or it was for something else.

    They may differ from `forms` in what is measured.
    """
    try:
        index = read_json(_part(folder))
        begun = forms_in(index, layers)
    except (OSError, ValueError):
        return None
    if index != index_of(layers, begun, store, method):
        return None
    return begun if _sizes(begun) == _sizes(forms) else None


def _sizes(forms: Forms) -> tuple[object, ...]:
    """Return what makes two forms the same but for what is measured: the hot experts, and the bytes of each matrix."""
    hot = frozenset() if forms.hot is None else forms.hot.experts
    return hot, [{name: matrix.nbytes for name, matrix in layout.formats.items()} for layout in forms.all_layouts]


def open_experts(
    layers: Sequence[MoELayer],
    store: FileStore,
    choice: ExpertsChoice,
    chunk_bytes: int,
    on_device: bool = False,
) -> FileStore:
    """Return a store of the experts of `store` in the form that was chosen. It then owns `store`, or is `store` itself.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint.
        choice: see `promoe.from_pretrained`.
        chunk_bytes: longest chunk.
        on_device: whether the slots will be on a device (see `read_formats`).

    Raises:
        ConfigError: there are no experts in this form that fit this checkpoint, machine and dtype.
    """
    if choice == "checkpoint":
        return store
    if choice == "auto":
        packed = None if on_device else _open_packed(layers, store, chunk_bytes)
        return packed or relaid_store(layers, store)
    has_name = choice in FORMATS or MIXED.fullmatch(str(choice)) is not None
    folder = default_folder(store, str(choice)) if has_name else Path(choice)
    if not (folder / INDEX).is_file():
        if choice in QUANTIZED and (kept := kept_in(layers, store, str(choice))) is not None:
            return kept
        if has_name:
            found = f"{folder} has no {INDEX}. Write them once with `{command_for(str(choice))}`"
        else:
            found = f"it is not a folder with an {INDEX}. Write one with `promoe quantize MODEL --out FOLDER` or `promoe pack`"
        raise ConfigError(
            f'experts={shown(str(choice))} was asked for, but {found}, or open the model with experts="checkpoint" (--experts '
            "checkpoint), which reads the checkpoint's own files."
        )
    try:
        return _open_folder(layers, store, folder, chunk_bytes, on_device=on_device)
    # Torch raises RuntimeError if there is too little memory.
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        raise ConfigError(f'{_cannot(folder, error)} Or open the model with experts="checkpoint".') from error


def kept_in(layers: Sequence[MoELayer], store: FileStore, name: str) -> FileStore | None:
    """Return a store of the experts of a checkpoint in fewer bits that are in a slot format; None: they are not.

    In "int8" are also those that have 4 bits in the checkpoint, and stay so; matrices of shapes that have no product in
    fewer bits are in 16.
    """
    to_int8 = name == "int8"
    kept = relaid_store(layers, store, to_int8=to_int8)
    if kept is store or to_int8:
        return None if kept is store else kept
    for layer, layout in zip(layers, kept.layouts, strict=True):
        if {one.name for one in layout.formats.values()} != {name} or len(layout.formats) != len(matrices(layer)):
            return None
    return kept


def _open_packed(layers: Sequence[MoELayer], store: FileStore, chunk_bytes: int) -> FileStore | None:
    """Return a store of packed experts; None: there are none beside the checkpoint that fit."""
    folder = default_folder(store, "packed")
    if not (folder / INDEX).is_file():
        return None
    try:
        return _open_folder(layers, store, folder, chunk_bytes, exact=True)
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        logger.warning("%s The checkpoint's own files are read instead.", _cannot(folder, error))
        return None


def _cannot(folder: Path, error: BaseException) -> str:
    return (
        f"The experts in {folder} cannot be used: {str(error).removesuffix('.')}. Write them again (promoe pack, promoe "
        "quantize)."
    )


def _open_folder(
    layers: Sequence[MoELayer],
    store: FileStore,
    folder: Path,
    chunk_bytes: int,
    *,
    exact: bool = False,
    on_device: bool = False,
) -> SlotFilesStore:
    """Return a store of the experts in `folder`, which then owns `store`. If `exact`, they must not be quantised.

    Raises:
        ValueError: they are of another checkpoint, machine or dtype, or quantised.
        CheckpointError: the files are damaged.
        OSError: they cannot be read.
    """
    index = read_json(folder / INDEX)
    forms = forms_in(index, layers, on_device)
    if exact and not all(matrix.exact for matrix in forms.matrices):
        raise ValueError("They are quantised, which experts=FOLDER has to ask for.")
    expected = index_of(layers, forms, store, index["method"])
    for key, what in DIFFERENCES.items():
        if index.get(key) != expected.get(key):
            raise ValueError(f"They are of {what}.")
    digest = digest_of(expected)
    files = TensorFiles.open(_paths(layers, folder))
    try:
        for layer, file in zip(layers, files.files, strict=True):
            if file.fingerprint.header_crc != zlib.crc32(forms.header(layer, digest)):
                raise ValueError(f"{file.path.name} does not belong to the experts that {INDEX} describes.")
        return SlotFilesStore(files, forms.layouts, store.num_experts, chunk_bytes, store, forms.hot)
    except BaseException:
        files.close()
        raise


def _paths(layers: Sequence[MoELayer], folder: Path) -> list[Path]:
    return [layer_path(folder, layer.layer_idx) for layer in layers]


def _check_room(folder: Path, nbytes: int, replaced: Sequence[Path]) -> None:
    free_bytes = shutil.disk_usage(folder).free
    free_bytes += sum(path.stat().st_size for path in replaced if path.is_file())
    if nbytes > free_bytes:
        raise ConfigError(
            f"The experts take {format_memory(nbytes)}, but {folder} has only {format_memory(free_bytes)} free. Free some "
            "space, or choose another folder with --out."
        )


def slots_of(
    layer: MoELayer, layout: ExpertLayout, store: Store, encode: Encode, experts: Iterable[int] | None = None
) -> Iterator[bytearray]:
    """Yield each of the `experts` of a layer (None: all) as it lies in a slot of `layout`; the next one overwrites it."""
    plain, slot = bytearray(layer.layout.slot_bytes), bytearray(layout.slot_bytes)
    for expert_idx in range(layer.num_experts) if experts is None else experts:
        _read(store, ExpertKey(layer.layer_idx, expert_idx), plain)
        for spec, target in zip(layer.layout.tensors, layout.tensors, strict=True):
            if target.format is None:
                slot[target.offset_bytes : target.end_bytes] = memoryview(plain)[spec.offset_bytes : spec.end_bytes]
                continue
            count = spec.nbytes // spec.dtype.itemsize
            matrix = torch.frombuffer(plain, dtype=spec.dtype, count=count, offset=spec.offset_bytes).view(spec.shape)
            content = encode(layer, spec.name, matrix, target.format).numpy().data
            slot[target.offset_bytes : target.end_bytes] = content
        yield slot


def _read(store: Store, key: ExpertKey, slot: bytearray) -> None:
    try:
        read_expert(store, key, memoryview(slot))
    except OSError as error:
        raise CheckpointError(
            f"Expert {key.expert_idx} of MoE layer {key.layer_idx} could not be read: {error}. Remove the cause and type the "
            "same command again: it goes on from there."
        ) from error


def _write_whole(path: Path, index: Mapping[str, Any]) -> None:
    part = path.with_name(f"{path.name}.new")
    with part.open("wb") as file:
        file.write(json.dumps(index, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
