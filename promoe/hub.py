"""Whether there is a checkpoint of a name: in a folder, or on the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promoe.errors import CheckpointError

# Arguments of from_pretrained that say how to find a file of a checkpoint.
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def check_found(path_or_id: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
    """Before Transformers looks for one file after the other, and asks a hub that does not answer for each of them.

    Args:
        path_or_id: folder of a checkpoint, or a hub id.
        options: as for `from_pretrained`.

    Raises:
        CheckpointError: there is no config.json, neither in a folder of that name nor of such an id.
    """
    name = os.fspath(path_or_id)
    if is_folder(name):
        return
    from transformers.utils import cached_file

    found = {key: value for key, value in (options or {}).items() if key in OF_THE_HUB}
    try:
        cached_file(name, "config.json", **found)
    except Exception as error:  # the hub's client has errors of several kinds
        raise CheckpointError(
            f"There is no folder '{name[:500]}', and nothing of that name could be had from the hub: "
            f"{' '.join(str(error)[:2000].split()).rstrip('. ')}. Give the folder of a checkpoint, or a hub id that can be "
            "reached."
        ) from error


def check_has_config(folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError where a folder has no configuration."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise CheckpointError(
            f"The folder '{os.fspath(folder)[:500]}' has no config.json: it is no checkpoint of Transformers. Give one "
            "that has it."
        )


def is_folder(name: str) -> bool:
    """Whether that is the folder of a checkpoint; else it may be a hub id.

    Raises:
        CheckpointError: it is another folder, or a path that leads to none.
    """
    if os.path.isdir(name):
        check_has_config(name)
        return True
    if (
        not name.strip()
        or os.path.exists(name)
        or Path(name).is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    ):
        raise CheckpointError(
            f"There is no folder '{name[:500]}'. Give the folder of a checkpoint, one with a config.json, or a hub id such as "
            "org/name."
        )
    return False
