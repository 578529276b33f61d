"""Files that promoe writes for people, and files that others wrote.

Written: the path is checked before a long run begins, and a file is written as a whole or not at all. Read: the file may be
damaged or hostile, so it is opened only if it is a plain file, it is read up to a limit, and its JSON must stand for one value.
What that value should mean is checked where it is used.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from promoe.errors import ConfigError

PathLike = str | os.PathLike[str]

# As much as the header of a safetensors file may have, by its format.
MAX_JSON_BYTES = 100 * 1024 * 1024
LFS_BEGINS = b"version https://git-lfs"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def make_folder(folder: Path) -> None:
    """Make a folder for results, and its parents, unless it exists.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder '{folder}': {error.strerror or error}. Choose another.") from error


def check_writable(path: PathLike) -> Path:
    """Return `path` as a Path if a file can be written there; leave nothing behind.

    The check really creates (and removes) a temporary file beside it: access bits lie for root, on read-only mounts
    and on network drives.

    Raises:
        ConfigError: the folder does not exist or refuses new files, or `path` is something other than a plain file.
    """
    target = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(target)  # raises OSError for a name that no file can have
        if os.path.exists(target) and not os.path.isfile(target):
            kind = "a folder" if os.path.isdir(target) else "not a plain file"
            raise ConfigError(f"Cannot write '{target}': it is {kind}. Give the path of a file.")
        if not os.path.isdir(target.parent):
            raise ConfigError(f"Cannot write '{target}': the folder '{target.parent}' does not exist. Create it first.")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:64]}."):
            pass
    except OSError as error:  # also from looking: names that are too long, folders that may not be entered
        raise _unwritable(target, error) from error
    return target


def write_atomically(path: PathLike, pieces: Iterable[str]) -> Path:
    """Write the text `pieces` to `path` in UTF-8: to a temporary file beside it, then renamed over it.

    A reader sees the old file or the whole new one. An exception while writing leaves the old file as it was. A character
    that UTF-8 does not have, as in some names of files, is written as "?".

    Raises:
        ConfigError: the file cannot be written (no such folder, no permission, disk full).
    """
    target = check_writable(path)
    temporary: str | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="replace",
            newline="\n",
            dir=target.parent,
            prefix=f".{target.name[:64]}.",
            delete=False,
        ) as file:
            temporary = file.name
            file.writelines(pieces)
        os.chmod(temporary, 0o666 & ~_umask())  # temporary files are private; the result should be an ordinary file
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        if temporary is not None:
            os.unlink(temporary)
    return target


def _umask() -> int:
    # The only portable way to read it is to set it; both calls are immediate.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _unwritable(target: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot write '{target}': {error.strerror or error}. Choose a folder with write permission and free space."
    )


def open_plain(path: PathLike) -> int:
    """Open a plain file, or a link to one, and return its descriptor for reading.

    Raises:
        OSError: there is none, or it is a folder, a device or a pipe, which could be waited for without end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a plain file", str(path))
    return fd


def is_lfs_pointer(content: bytes) -> bool:
    """Return whether a file begins as what Git LFS leaves in place of one that was not pulled."""
    return content.startswith(LFS_BEGINS)


def read_json(path: PathLike) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: the file cannot be read, or is not a plain file.
        ValueError: the file is larger than 100 MiB, or see `loads`.
    """
    with open(open_plain(path), "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if is_lfs_pointer(content):
        raise ValueError("it is a Git LFS pointer; run `git lfs pull` in its folder")
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
    return loads(content)


def loads(content: bytes, *, constants: bool = True) -> Any:
    """Return the value of JSON in UTF-8, if every reader would find the same one in it.

    Args:
        content: the JSON.
        constants: whether NaN and Infinity, which Python writes and JSON does not have, may be in it.

    Raises:
        ValueError: it is not JSON, has a key twice, numbers that are too long, text that is not Unicode, or is nested too
            deeply.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_keys_once, parse_constant=None if constants else _no_constant)
        if _SURROGATE.search(text):
            _check_whole_characters(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def values_of(content: bytes, key: str) -> list[Any]:
    """Return the values of a key of a JSON object, also of one that `loads` refuses.

    Raises:
        ValueError: it is not JSON.
        TypeError: it is not an object.
    """
    pairs: Any = json.loads(content.decode("utf-8", "replace"), object_pairs_hook=tuple)
    return [value for name, value in pairs if name == key]


def _check_whole_characters(value: Any) -> None:
    """Raise ValueError if a text has half of a surrogate pair: such a character cannot be written or printed."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise ValueError(f"a text has half a character, {half}, without its other half") from None


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
