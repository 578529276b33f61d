"""The parts of a GGUF checkpoint: `model-00001-of-00003.gguf` and so on, each with a header of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from promoe.errors import CheckpointError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def stem_of(name: str) -> str:
    """Return the name of a GGUF checkpoint: that of its file, without the number of the part and the suffix."""
    found = _PART.fullmatch(name)
    return found["stem"] if found else name.removesuffix(SUFFIX)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the checkpoint that a file belongs to, in order; the file's own if it has no parts."""
    found = _PART.fullmatch(name)
    count = int(found["count"]) if found else 0
    if found is None or not count:
        return [name]
    return [f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def locate_parts(path: Path) -> list[Path]:
    """Return the paths of all parts of the checkpoint that a file belongs to.

    Raises:
        CheckpointError: parts are missing.
    """
    paths = [path.parent / name for name in part_names(path.name)]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        names = ", ".join(missing[:3]) + (" and so on" if len(missing) > 3 else "")
        raise CheckpointError(
            f"'{str(path)[:500]}' is one of {len(paths)} parts, and {len(missing)} of them are not in its folder: "
            f"{names}. Download or copy them."
        )
    return paths


def check_parts(paths: Sequence[Path], headers: Sequence[Mapping[str, Any]], num_tensors: int) -> None:
    """Raise CheckpointError unless the headers say that these files are the parts of one checkpoint.

    Args:
        paths: of the parts, in order.
        headers: the metadata of each part.
        num_tensors: tensors in all parts that have different names.
    """
    for idx, (path, metadata) in enumerate(zip(paths, headers, strict=True)):
        number, count = metadata.get("split.no", 0), metadata.get("split.count", 1)
        if len(paths) == 1 and count in (0, 1):
            continue
        if count != len(paths) or number != idx:
            raise CheckpointError(
                f"{path} is part {idx + 1} of {len(paths)} by its name, and its header says part {str(number)[:20]} (from 0 "
                f"on) of {str(count)[:20]}. Give the parts the names that they were published with, such as "
                "model-00001-of-00003.gguf."
            )
    expected = headers[0].get("split.tensors.count", num_tensors)
    if len(paths) > 1 and expected != num_tensors:
        raise CheckpointError(
            f"{paths[0]} says that its {len(paths)} parts have {str(expected)[:20]} tensors, and they have {num_tensors}. "
            "A part is of another checkpoint: download them again."
        )
