"""Files that promoe writes for people: checked before a long run begins, and never left half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from promoe.errors import ConfigError

PathLike = str | os.PathLike[str]


def make_folder(folder: Path) -> None:
    """Make a folder for results, and those around it, unless it is there.

    Raises:
        ConfigError: that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder '{folder}': {error.strerror or error}. Choose another.") from error


def check_writable(path: PathLike) -> Path:
    """Return `path` as a Path if a file can be written there; leaves nothing behind.

    The check really creates (and removes) a temporary file beside it: access bits lie for root, on read-only mounts
    and on network drives.

    Raises:
        ConfigError: the folder does not exist or refuses new files, or `path` is something other than a plain file.
    """
    target = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(target)  # a name that no file can have
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

    A reader sees the old file or the whole new one. An exception while writing leaves the old file as it was. Names of files
    may hold what no UTF-8 has; there a "?" is written.

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
