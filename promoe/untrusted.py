"""Files that others wrote, and that may be damaged or hostile: opened if they are plain files, read up to a limit, JSON
without surprises. Knows bytes; what they should mean is checked where they are used.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from typing import Any

# As much as the header of a safetensors file may have, by its format.
MAX_JSON_BYTES = 100 * 1024 * 1024
LFS_BEGINS = b"version https://git-lfs"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_plain(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading a plain file, or a link to one.

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


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: it cannot be read, or is not a plain file.
        ValueError: it is larger than 100 MiB, or see `loads`.
    """
    with open(open_plain(path), "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if is_lfs_pointer(content):
        raise ValueError("it is a Git LFS pointer; run `git lfs pull` in its folder")
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
    return loads(content)


def loads(content: bytes, *, constants: bool = True) -> Any:
    """The value that JSON in UTF-8 stands for, where it stands for one alone.

    Args:
        content: the JSON.
        constants: whether NaN and Infinity, which Python writes and JSON does not have, may be in it.

    Raises:
        ValueError: it is no JSON, has a key twice, numbers that are too long, text that is no Unicode, or is nested too deeply.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_keys_once, parse_constant=None if constants else _no_constant)
        if _SURROGATE.search(text):  # half a character, which nothing can write or print
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
