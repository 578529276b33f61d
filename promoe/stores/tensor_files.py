"""Finds, opens, checks and reads a checkpoint's files, safetensors or GGUF. They are read with `preadv`, never mapped.

A checkpoint may have more files than a process may have open (`promoe.stores.open_files`).

It knows files and tensors by name; not models, experts or slots.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from promoe.errors import CheckpointError
from promoe.files import LFS_BEGINS, is_lfs_pointer, open_plain, read_json
from promoe.stores.fingerprint import Fingerprint
from promoe.stores.gguf_header import MAGIC, GgufHeader, read_gguf_header
from promoe.stores.gguf_parts import SUFFIX, check_parts
from promoe.stores.open_files import OPEN_FILES, Descriptor, KeptFile, reopened
from promoe.stores.safetensors_header import TensorRange, read_header

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class TensorFile:
    """A file of tensors. Its header was checked against its size; each read checks that the file is unchanged.

    Attributes:
        tensors: by name.
        metadata: what else a GGUF file says, by key; None: it is a safetensors file.
        keep_open: whether it stays open until it is closed, because its name may go.
    """

    def __init__(
        self,
        path: Path,
        descriptor: Descriptor,
        fingerprint: Fingerprint,
        tensors: Mapping[str, TensorRange],
        metadata: Mapping[str, Any] | None = None,
        keep_open: bool = False,
    ) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.tensors = tensors
        self.metadata = metadata
        self.keep_open = keep_open
        self._absolute = Path(os.path.abspath(path))  # the program may change its directory
        self._file = KeptFile(descriptor, keep_open)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    @property
    def size_bytes(self) -> int:
        """The size when it was opened, in bytes."""
        return self.fingerprint.size_bytes

    @classmethod
    def open(cls, path: str | os.PathLike[str], file_idx: int = 0, keep_open: bool = False) -> TensorFile:
        """Open `path` for reading; every tensor of its header gets `file_idx`.

        Raises:
            CheckpointError: the file is missing or unreadable, its header is invalid, or its size is not what the
                header says.
        """
        path = Path(path)
        with _opened(path) as fd:
            fingerprint = Fingerprint.of(fd)
            header = _header(path, fd, fingerprint.size_bytes, file_idx)
        descriptor = _descriptor(path, fd)
        if isinstance(header, GgufHeader):
            return cls(path, descriptor, fingerprint, header.tensors, header.metadata, keep_open)
        return cls(path, descriptor, fingerprint, header, None, keep_open)

    def read_into(self, offset_bytes: int, destination: memoryview) -> None:
        """Fill `destination` from `offset_bytes` on. Thread-safe; the GIL is released while reading.

        Raises:
            OSError: the file is closed, the device fails, the file ends early or changed since it was opened; the message
                names offset and bytes, or what changed.
        """
        view = destination.cast("B") if destination.format != "B" else destination
        if self.closed:
            what = f"Cannot read {len(view)} bytes at offset {offset_bytes}: closed"
            raise OSError(errno.EBADF, what, str(self.path))
        descriptor = self._descriptor()
        try:
            self._fill(descriptor.fd, offset_bytes, view)
        finally:
            del descriptor  # otherwise the traceback of an error would keep the file open

    def _fill(self, fd: int, offset_bytes: int, view: memoryview) -> None:
        expected_bytes, found_bytes = len(view), 0
        while found_bytes < expected_bytes:
            try:
                count = os.preadv(fd, [view[found_bytes:]], offset_bytes + found_bytes)
            except OSError as error:
                what = f"Cannot read {expected_bytes} bytes at offset {offset_bytes}, found {found_bytes}"
                raise OSError(error.errno, f"{what}: {error.strerror}", str(self.path)) from error
            if count == 0:
                what = f"File ends early: expected {expected_bytes} bytes at offset {offset_bytes}, found {found_bytes}"
                _, changes = self.fingerprint.look_again(fd, fd, self.path)
                raise OSError(errno.EIO, f"{what} ({changes})" if changes else what, str(self.path))
            found_bytes += count
        self.check_unchanged(fd)  # after the read: a file gets its new time before its new bytes can be read

    def check_unchanged(self, fd: int) -> None:
        """Raise OSError, saying what changed, unless `fd` is this file, open, as it was when it was opened."""
        if not self.fingerprint.is_of(os.fstat(fd)):
            self._look_again(fd, self._descriptor().fd)

    def close(self) -> None:
        """Close the file once the reads in flight have ended. Closing twice is allowed."""
        self._file.close()

    def _descriptor(self) -> Descriptor:
        return self._file.descriptor(self._reopened)

    def _reopened(self) -> Descriptor:
        descriptor = reopened(self._absolute, lambda: _descriptor(self.path, open_plain(self._absolute)))
        try:
            self._look_again(descriptor.fd, descriptor.fd)
            return descriptor
        finally:
            del descriptor  # as above

    def _look_again(self, fd: int, own_fd: int) -> None:
        self.fingerprint, changes = self.fingerprint.look_again(fd, own_fd, self.path)
        if changes:
            what = f"The file changed since the model was opened ({changes}). Put it back as it was, or open the model again"
            raise OSError(errno.ESTALE, what, str(self.path))


class TensorFiles:
    """All files of one checkpoint, open, and the tensors in them by name."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.files = tuple(files)
        self.tensors: dict[str, TensorRange] = {}
        for file in files:  # if two files have the same name, the later one counts, as in Transformers
            self.tensors.update(file.tensors)

    @classmethod
    def open(cls, paths: Iterable[str | os.PathLike[str]], keep_open: bool = False) -> TensorFiles:
        """Open files. Their headers say what is in them: an index may be stale, and only names the files.

        Args:
            paths: the files.
            keep_open: whether they stay open until they are closed, because their names may go.

        Raises:
            CheckpointError: a file is missing, damaged or truncated, or GGUF files are not the parts of one checkpoint.
        """
        files: list[TensorFile] = []
        try:
            for file_idx, path in enumerate(paths):
                files.append(TensorFile.open(path, file_idx, keep_open))
            _check_kinds(files)
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(files)

    def read_into(self, tensor: TensorRange, destination: memoryview) -> None:
        """Fill `destination` (`tensor.nbytes` long) with the tensor's bytes. Raises OSError as `TensorFile.read_into`."""
        self.files[tensor.file_idx].read_into(tensor.offset_bytes, destination)

    def close(self) -> None:
        """Close all files. Closing twice is allowed."""
        for file in self.files:
            file.close()


def check_files(paths: Iterable[Path]) -> None:
    """Raise CheckpointError unless these are whole safetensors files. Reads their headers, one file after the other."""
    for path in paths:
        with _opened(path) as fd:
            read_header(path, fd, os.fstat(fd).st_size, 0)
        os.close(fd)


def _descriptor(path: Path, fd: int) -> Descriptor:
    """Return the descriptor of a file that was opened for reads of tensors."""
    descriptor = Descriptor(path, fd)
    if hasattr(os, "posix_fadvise"):
        # Each read has a known size; reading ahead would only fill the page cache with bytes that nobody asked for.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _header(path: Path, fd: int, size_bytes: int, file_idx: int) -> GgufHeader | dict[str, TensorRange]:
    """Return the header of a file of either kind, which its first bytes or its name tell."""
    begins = os.pread(fd, len(LFS_BEGINS), 0)
    if begins.startswith(MAGIC) or (path.suffix == SUFFIX and not is_lfs_pointer(begins)):
        return read_gguf_header(path, fd, size_bytes, file_idx)
    return read_header(path, fd, size_bytes, file_idx)


def _check_kinds(files: Sequence[TensorFile]) -> None:
    """Raise CheckpointError if some of the files are GGUF and others not, or if they are not the parts of one checkpoint."""
    headers = [file.metadata for file in files if file.metadata is not None]
    if headers and len(headers) < len(files):
        other = next(file.path for file in files if file.metadata is None)
        raise CheckpointError(f"{other} is not a GGUF file, and other files of the checkpoint are. Download it again.")
    if headers:
        names = {name for file in files for name in file.tensors}
        check_parts([file.path for file in files], headers, len(names))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a checkpoint's file for the body of the `with`. It stays open unless the body fails."""
    try:
        fd = OPEN_FILES.opened(lambda: open_plain(path))
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        yield fd
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        raise


def locate_files(checkpoint: str | os.PathLike[str], weights_name: Any = None, from_config: bool = True) -> list[Path]:
    """Return the safetensors files of a local checkpoint, in order of name.

    Args:
        checkpoint: a folder, one `.safetensors` file, or an index.
        weights_name: file or index in the folder; None: the usual names.
        from_config: without a name, ask the folder's config.json for one (`transformers_weights`).

    Raises:
        CheckpointError: there are none, or the index is unreadable or names files outside the folder.
    """
    path = Path(checkpoint)
    if path.is_dir():
        if weights_name is None and from_config and (path / "config.json").is_file():
            config = _json(path / "config.json")
            weights_name = config.get("transformers_weights") if isinstance(config, dict) else None
        path = _weights_in(path, weights_name)
    if not path.name.endswith(".index.json"):
        return [path]
    index = _json(path)
    try:
        names = set(index["weight_map"].values())
        if not names:
            raise ValueError("its weight_map does not name files")
        check_inside(names, "index")
        if not isinstance(index.get("metadata"), dict):
            raise ValueError(
                'it has no "metadata", without which Transformers does not open it: add "metadata": {} to it'
            )
    except CheckpointError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"The index {path} cannot be used: {type(error).__name__}: {error}. Fix it, or get it again from where the "
            "checkpoint is from."
        ) from error
    return [path.parent / name for name in sorted(names)]


def _weights_in(folder: Path, weights_name: Any) -> Path:
    """Return the folder's one file of weights, or its index."""
    if weights_name is not None:
        check_inside([weights_name], "config.json")
        return folder / str(weights_name)
    for name in (WEIGHTS_NAME, INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    found = sorted(entry.name for entry in folder.iterdir())
    raise CheckpointError(
        f"No {WEIGHTS_NAME} or {INDEX_NAME} in {folder}. Found {', '.join(found[:8]) or 'an empty folder'}. "
        "Experts are read from safetensors files only: convert the checkpoint with model.save_pretrained(...) first."
    )


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a valid JSON file: {error}. Fix it, or get it again.") from error


def check_inside(names: Iterable[Any], where: str) -> None:
    """Raise CheckpointError if a name leads out of the folder. The file itself may be a link: in the hub's cache it is."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"The checkpoint's {where} names {name!r} where the name of a file is expected. Fix it."
            )
        parts = PurePath(name).parts
        if ".." in parts or PurePath(name).is_absolute():
            raise CheckpointError(
                f"The checkpoint's {where} names the file {name[:200]!r}, which lies outside the checkpoint's folder. Do not "
                "use this checkpoint, or download it again from where you trust it."
            )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error to raise when a checkpoint's file cannot be opened, with a remedy."""
    return CheckpointError(f"Cannot open checkpoint file {str(path)[:500]}: {error.strerror}. {remedy(error)}")


def remedy(error: OSError) -> str:
    """Return a remedy for a file that cannot be opened or read."""
    if error.errno == errno.ENOENT:
        return "The checkpoint is not complete: download or copy that file."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Give this user the right to read it (chmod u+r), or run as one who has it."
    if error.errno == errno.EMFILE:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"This process may have {limit} files open, and that many are, beside those that promoe can close: raise the "
            f"limit (`ulimit -n {max(4 * limit, 4096)}` before Python is started; the system allows {most})."
        )
    if error.errno == errno.EINVAL:
        return "Put the file itself there, not a folder, a device or a pipe."
    if error.errno == errno.ENFILE:
        return "The whole system has too many files open: close other programs."
    if error.errno == errno.ESTALE:
        return "Try again."
    return "Check the disk or the file system that it is on."
