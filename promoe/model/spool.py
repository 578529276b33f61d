"""Write the experts of a model in RAM to temporary files, plain or quantised, for `promoe.patch(model, store="disk")`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from promoe.errors import ConfigError
from promoe.experts.moe_layers import MoELayer
from promoe.model.slot_folders import slots_of
from promoe.stores import HostStore
from promoe.stores.file_store import FileStore
from promoe.stores.layout import ExpertLayout
from promoe.stores.slot_files import SlotFilesStore, header_of, layer_path, write_layer
from promoe.stores.slot_format import MatrixFormat
from promoe.stores.tensor_files import TensorFiles
from promoe.transfer.control_groups import PROC
from promoe.transfer.links.disk import drop_files
from promoe.units import format_memory

IN_RAM = ("tmpfs", "ramfs")


class SpooledStore(SlotFilesStore):
    """A store over files that `spool` wrote."""


def spool(
    layers: Sequence[MoELayer],
    live: HostStore,
    parent: str | os.PathLike[str] | None,
    chunk_bytes: int,
    layouts: Sequence[ExpertLayout] | None = None,
    source: FileStore | None = None,
) -> tuple[SpooledStore, TemporaryDirectory[str]]:
    """Write all experts to a new folder.

    Args:
        layers: the model's MoE layers.
        live: a store of their experts in RAM.
        parent: the folder to make the new one in. None: the system's folder for temporary files.
        chunk_bytes: longest chunk of the store.
        layouts: how an expert of each layer lies in its slot; None: plain.
        source: a store of the same experts that the new one is to own; None: there is none.

    Returns:
        A store over the files, and the new folder. The folder is removed when that object is deleted, at the latest;
        the store has the files open and can still read them.

    Raises:
        ConfigError: there is too little space, the folder is in RAM, or it cannot be written. No files are left behind.
    """
    place = Path(tempfile.gettempdir() if parent is None else parent)
    layouts = live.layouts if layouts is None else layouts
    nbytes = sum(layer.num_experts * layout.slot_bytes for layer, layout in zip(layers, layouts, strict=True))
    folder: TemporaryDirectory[str] | None = None
    try:
        _check_place(place, nbytes)
        folder = TemporaryDirectory(prefix="promoe-spool-", dir=place, ignore_cleanup_errors=True)
        paths = [layer_path(Path(folder.name), layer.layer_idx) for layer in layers]
        for layer, layout, path in zip(layers, layouts, paths, strict=True):
            header = header_of({"layer": layer.name}, layer.num_experts, layout)
            write_layer(path, header, slots_of(layer, layout, live, _pack))
        drop_files(paths)  # otherwise the page cache keeps what was written, as much as all experts
        files = TensorFiles.open(paths, keep_open=True)
        return SpooledStore(files, layouts, live.num_experts, chunk_bytes, source), folder
    except BaseException as error:
        if folder is not None:
            folder.cleanup()
        if isinstance(error, OSError):
            raise ConfigError(
                f"The model's experts ({format_memory(nbytes)}) could not be written to '{place}': {error.strerror or error}. "
                "Nothing was changed. Choose another folder: config=PromoeConfig(spool_folder=...)."
            ) from error
        raise


def _pack(layer: MoELayer, name: str, matrix: torch.Tensor, matrix_format: MatrixFormat) -> torch.Tensor:
    return matrix_format.pack(matrix)


def _check_place(place: Path, nbytes: int) -> None:
    kind = file_system(place)
    if kind in IN_RAM:
        raise ConfigError(
            f"The model's experts ({format_memory(nbytes)}) would be written to '{place}', which is in RAM ({kind}), so that "
            "no RAM would be freed. Nothing was changed. Choose a folder on a disk: config=PromoeConfig(spool_folder=...)."
        )
    free_bytes = shutil.disk_usage(place).free
    if nbytes > free_bytes:
        raise ConfigError(
            f"The model's experts take {format_memory(nbytes)}, but '{place}' has only {format_memory(free_bytes)} free. "
            "Nothing was changed. Free some space, or choose another folder: config=PromoeConfig(spool_folder=...)."
        )


def file_system(folder: Path, proc: Path = PROC) -> str | None:
    """Return the kind of file system that a folder is on, such as "ext4"; None if the system has no /proc.

    Raises:
        OSError: there is no such folder.
    """
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    except OSError:
        return None
    return next((mount[mount.index("-") + 1] for mount in mounts if "-" in mount and mount[2] == number), None)
