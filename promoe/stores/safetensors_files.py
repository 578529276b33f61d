"""The safetensors files of a checkpoint: found and checked at open, read with `preadv`, never mapped into memory.

Knows files and tensors by name; does not know models, experts or slots.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from promoe.errors import CheckpointError
from promoe.stores.fingerprint import Fingerprint
from promoe.stores.safetensors_header import TensorRange, read_header
from promoe.untrusted import open_plain, read_json

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class SafetensorsFile:
    """One open safetensors file whose header was checked against the file's size; each read checks that it is unchanged."""

    def __init__(self, path: Path, fd: int, fingerprint: Fingerprint, tensors: Mapping[str, TensorRange]) -> None:
        self.path = path
        self.fd = fd
        self.fingerprint = fingerprint
        self.tensors = tensors
        # Nobody closes what Ctrl-C ended in the midst of being opened.
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False

    @property
    def size_bytes(self) -> int:
        """When it was opened."""
        return self.fingerprint.size_bytes

    @classmethod
    def open(cls, path: str | os.PathLike[str], file_idx: int = 0) -> SafetensorsFile:
        """Open `path` for reading; every tensor of its header gets `file_idx`.

        Raises:
            CheckpointError: the file is missing or unreadable, its header is not one, or its size is not what the
                header says.
        """
        path = Path(path)
        try:
            fd = open_plain(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            fingerprint = Fingerprint.of(fd)
            tensors = read_header(path, fd, fingerprint.size_bytes, file_idx)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise _unreadable(path, error) from error
            raise
        if hasattr(os, "posix_fadvise"):
            # Reads come in ranges of a known size, and the neighbours' bytes must not be pulled into the page cache.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return cls(path, fd, fingerprint, tensors)

    def read_into(self, offset_bytes: int, destination: memoryview) -> None:
        """Fill `destination` from `offset_bytes` on. Thread-safe; the GIL is released while reading.

        Raises:
            OSError: the file is closed, the device fails, the file ends early or changed since it was opened; the message
                names offset and bytes, or what changed.
        """
        view = destination.cast("B") if destination.format != "B" else destination
        expected_bytes, found_bytes = len(view), 0
        while found_bytes < expected_bytes:
            if self.fd < 0:
                raise OSError(
                    errno.EBADF, f"Cannot read {expected_bytes} bytes at offset {offset_bytes}: closed", str(self.path)
                )
            try:
                count = os.preadv(self.fd, [view[found_bytes:]], offset_bytes + found_bytes)
            except OSError as error:
                what = f"Cannot read {expected_bytes} bytes at offset {offset_bytes}, found {found_bytes}"
                raise OSError(error.errno, f"{what}: {error.strerror}", str(self.path)) from error
            if count == 0:
                what = f"File ends early: expected {expected_bytes} bytes at offset {offset_bytes}, found {found_bytes}"
                changes = self.fingerprint.changes(self.fd, self.path)
                raise OSError(errno.EIO, f"{what} ({changes})" if changes else what, str(self.path))
            found_bytes += count
        self.check_unchanged(self.fd)  # after the read: a file is dated before other bytes can be read from it

    def check_unchanged(self, fd: int) -> None:
        """Raise OSError, saying what changed, unless `fd` is this file, open, as it was when it was opened."""
        if changes := self.fingerprint.changes(fd, self.path):
            what = f"The file changed since the model was opened ({changes}). Put it back as it was, or open the model again"
            raise OSError(errno.ESTALE, what, str(self.path))

    def close(self) -> None:
        """Close the descriptor; no thread may be reading. Closing twice is allowed."""
        self.fd = -1
        self._closing()


class SafetensorsFiles:
    """All files of one checkpoint, open, and the tensors in them by name."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self.files = tuple(files)
        self.tensors: dict[str, TensorRange] = {}
        for file in files:  # of a name in two files the later one counts, as in Transformers
            self.tensors.update(file.tensors)

    @classmethod
    def open(
        cls, paths: Iterable[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None
    ) -> SafetensorsFiles:
        """Open files; with `weight_map` (tensor name -> file name, from the index) also check that each tensor is
        there.

        Raises:
            CheckpointError: a file is missing, damaged or truncated, or lacks a tensor that the index places in it; or the
                index names one outside the folder.
        """
        files: list[SafetensorsFile] = []
        _check_inside((weight_map or {}).values())
        try:
            for file_idx, path in enumerate(paths):
                files.append(SafetensorsFile.open(path, file_idx))
            _check_index({file.path.name: file for file in files}, weight_map or {})
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(files)

    def read_into(self, tensor: TensorRange, destination: memoryview) -> None:
        """Fill `destination` (`tensor.nbytes` long) with the tensor's bytes. OSError as in `SafetensorsFile`."""
        self.files[tensor.file_idx].read_into(tensor.offset_bytes, destination)

    def close(self) -> None:
        """Close all files. Closing twice is allowed."""
        for file in self.files:
            file.close()


def locate_files(checkpoint: str | os.PathLike[str]) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a local checkpoint: a folder, one `.safetensors` file, or an index.

    Returns:
        The files' paths in order of name, and the index's weight map (tensor name -> file name) if there is an index.

    Raises:
        CheckpointError: there are none, or the index is not readable, or names files outside the folder.
    """
    path = Path(checkpoint)
    if path.is_dir():
        if (path / WEIGHTS_NAME).is_file():
            return [path / WEIGHTS_NAME], None
        if not (path / INDEX_NAME).is_file():
            found = sorted(entry.name for entry in path.iterdir())
            raise CheckpointError(
                f"No {WEIGHTS_NAME} or {INDEX_NAME} in {path}. Found {', '.join(found[:8]) or 'an empty folder'}. "
                "Experts are read from safetensors files only: convert the checkpoint with model.save_pretrained(...) "
                "first."
            )
        path = path / INDEX_NAME
    if not path.name.endswith(".index.json"):
        return [path], None
    try:
        weight_map = read_json(path)["weight_map"]
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("its weight_map does not name files")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"The index {path} cannot be read: {type(error).__name__}: {error}. Download or copy the checkpoint again."
        ) from error
    _check_inside(weight_map.values())
    return [path.parent / name for name in sorted(set(weight_map.values()))], dict(weight_map)


def _check_inside(names: Iterable[str]) -> None:
    """By name alone: in the hub's cache the files themselves are links out of the folder."""
    for name in set(names):
        parts = PurePath(name).parts
        if not parts or ".." in parts or PurePath(name).is_absolute():
            raise CheckpointError(
                f"The checkpoint's index names the file {name[:200]!r}, which lies outside the checkpoint's folder. Do not use "
                "this checkpoint, or download it again from where you trust it."
            )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot open checkpoint file {str(path)[:500]}: {error.strerror}. Download or copy the checkpoint again, complete."
    )


def _check_index(files: Mapping[str, SafetensorsFile], weight_map: Mapping[str, str]) -> None:
    by_shard: defaultdict[str, list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        by_shard[shard].append(name)
    for shard, names in sorted(by_shard.items()):
        file = files.get(Path(shard).name)
        if file is None:
            raise CheckpointError(
                f"The checkpoint's index names {shard} for {len(names)} tensors, but that file is not there. Found "
                f"{', '.join(files) or 'no files'}. Download or copy the checkpoint again, complete."
            )
        missing = [name for name in names if name not in file.tensors]
        if missing:
            raise CheckpointError(
                f"The checkpoint's index places {missing[0]!r} in {shard}, but that file does not have it "
                f"({len(missing)} of {len(names)} tensors missing). Index and files are of different checkpoints: "
                "download or copy it again."
            )
