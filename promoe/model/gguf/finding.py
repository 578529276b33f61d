"""Find the GGUF files that a name stands for: a file, a folder, or a file in a repository of the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from promoe.errors import CheckpointError, ConfigError, shown
from promoe.model.hub import OF_THE_HUB
from promoe.stores.gguf_header import MAGIC
from promoe.stores.gguf_parts import SUFFIX, locate_parts, part_names, stem_of
from promoe.stores.tensor_files import check_inside

OPTION = "gguf_file"
# Files with it in their name hold the vision or audio part of a model, and stand beside the language model's.
_OTHER_PART = "mmproj"


def is_gguf(path_or_id: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a name stands for GGUF files. Asks nobody but this machine.

    It does if it is a file that begins as one, a folder with such files and none of safetensors, or org/name/file.gguf of
    the hub, or if `options` name a `gguf_file`.
    """
    options = options or {}
    name = os.fspath(path_or_id)
    if options.get(OPTION) is not None:
        return True
    if os.path.isdir(name):
        folder = Path(name, options.get("subfolder") or "")
        return bool(_files_in(folder)) and not any(folder.glob("*.safetensors"))
    return name.endswith(SUFFIX) or (os.path.isfile(name) and _begins_as_one(name))


def find_gguf(path_or_id: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> list[Path]:
    """Return the files of a GGUF checkpoint, in the order of their parts. A file on the hub is downloaded, with all parts.

    Args:
        path_or_id: a name for which `is_gguf`: a file or any of its parts, a folder, or org/name/file.gguf of the hub.
        options: as for `from_pretrained`; with `gguf_file`, `path_or_id` is the folder or hub id that has it.

    Raises:
        CheckpointError: there is no such file, parts of it are missing, or a folder has files of several models.
        ConfigError: `gguf_file` is not the name of a file.
    """
    options = options or {}
    name, file = os.fspath(path_or_id), options.get(OPTION)
    if file is not None:
        if not isinstance(file, str) or os.path.isfile(name):
            raise ConfigError(
                f"The '{OPTION}' argument must be the name of a file in the folder or hub id. Got {shown(file)} for "
                f"'{name[:500]}'. Leave it out if that is the file itself."
            )
        check_inside([file], f"'{OPTION}' argument")
        return (
            _in_folder(Path(name, options.get("subfolder") or "", file))
            if os.path.isdir(name)
            else _on_the_hub(name, file, options)
        )
    if os.path.isfile(name):
        return locate_parts(Path(name))
    if os.path.isdir(name):
        return _only_one(Path(name, options.get("subfolder") or ""))
    place = PurePosixPath(name)
    if place.is_absolute() or name.startswith((".", "~")) or len(place.parts) < 3:
        raise CheckpointError(
            f"There is no file '{name[:500]}'. Give the path of a GGUF file, or org/name/file.gguf for a file on the hub."
        )
    return _on_the_hub("/".join(place.parts[:2]), "/".join(place.parts[2:]), options)


def _begins_as_one(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def _in_folder(path: Path) -> list[Path]:
    if not path.is_file():
        raise CheckpointError(f"There is no file '{path.name[:200]}' in the folder '{str(path.parent)[:500]}'.")
    return locate_parts(path)


def _only_one(folder: Path) -> list[Path]:
    """Return the parts of the one model in a folder."""
    paths = [path for path in _files_in(folder) if _OTHER_PART not in path.name.lower()]
    models = {stem_of(path.name): path for path in reversed(paths)}
    if len(models) == 1:
        return locate_parts(paths[0])
    names = sorted(path.name for path in models.values())
    found = f"GGUF files of {len(models)} models: {', '.join(names[:6])}" if names else "only GGUF files of other parts"
    more = " and more" if len(names) > 6 else ""
    example = names[0] if names else f"model{SUFFIX}"
    raise CheckpointError(
        f"The folder '{str(folder)[:500]}' has {found}{more}. Give the path of one of them, such as "
        f"'{folder / example}'."
    )


def _on_the_hub(repository: str, file: str, options: Mapping[str, Any]) -> list[Path]:
    from transformers.utils import cached_file

    hub = {key: options[key] for key in OF_THE_HUB if key in options}
    where = PurePosixPath(file)
    try:
        paths = [cached_file(repository, str(where.with_name(name)), **hub) for name in part_names(where.name)]
    except Exception as error:  # the hub's client raises several kinds of errors
        raise CheckpointError(
            f"There is no file '{repository[:200]}/{file[:300]}' on this machine, and it could not be downloaded from the hub: "
            f"{' '.join(str(error)[:2000].split()).rstrip('. ')}. Give the path of a GGUF file, or org/name/file.gguf for a "
            "file on the hub."
        ) from error
    return [Path(path) for path in paths if path is not None]
