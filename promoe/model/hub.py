"""Find a checkpoint by its name, in a folder or on the hub, and the model that has its weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promoe.errors import CheckpointError, ConfigError
from promoe.files import read_json

# Arguments of from_pretrained that say where to find a checkpoint's files.
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
CONFIG_NAME, ADAPTER_CONFIG_NAME = "config.json", "adapter_config.json"


def base_of(path_or_id: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> str:
    """Return the checkpoint that has a model's weights: the given one, or the base model if that is only an adapter.

    This is called before Transformers looks for the files one by one. If the hub does not answer, Transformers would
    wait for it once per file.

    Args:
        path_or_id: folder of a checkpoint or of an adapter, or a hub id.
        options: as for `from_pretrained`.

    Raises:
        CheckpointError: there is no config.json in the folder or under the hub id, or none of an adapter's base model.
        ConfigError: it is an adapter and PEFT is not installed, or the adapter is in a subfolder.
    """
    name = os.fspath(path_or_id)
    found = {key: value for key, value in (options or {}).items() if key in OF_THE_HUB}
    subfolder = found.get("subfolder") or ""
    adapter = _adapter_in(Path(name, subfolder)) if is_folder(name, subfolder) else _adapter_on_the_hub(name, found)
    if adapter is None:
        return name
    base = _base_named(name, adapter)
    if subfolder:
        raise ConfigError(
            f"'{name[:500]}' has an adapter in '{subfolder}', and Transformers cannot open an adapter in a subfolder. Give the "
            "path of that folder itself."
        )
    _check_base(name, base)
    return base


def _adapter_in(folder: Path) -> str | None:
    """Return the path of the adapter's configuration in `folder`; None: the folder has a model's configuration."""
    adapter = folder / ADAPTER_CONFIG_NAME
    if not os.path.isfile(folder / CONFIG_NAME):
        return str(adapter)
    if os.path.isfile(adapter):  # Transformers will also read an adapter beside the model, so check that it can
        _read_adapter_config(str(folder), str(adapter))
    return None


def _adapter_on_the_hub(name: str, options: Mapping[str, Any]) -> str | None:
    """Return the path of the adapter's configuration in a hub repository; None: it has a model's configuration."""
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers.utils import cached_file

    try:
        try:
            if cached_file(name, CONFIG_NAME, **options) is not None:
                return None
        except OSError as error:  # there is no such file, or the hub cannot be reached
            if isinstance(error.__cause__, LocalEntryNotFoundError):
                # The hub was tried several times and did not answer. Look for the other file only on this machine.
                options = {**options, "local_files_only": True}
        found: str | None = cached_file(name, ADAPTER_CONFIG_NAME, **options)
    except Exception as error:  # the hub's client raises several kinds of errors
        raise CheckpointError(
            f"There is no folder '{name[:500]}', and nothing of that name could be downloaded from the hub: "
            f"{' '.join(str(error)[:2000].split()).rstrip('. ')}. Give the folder of a checkpoint, or a hub id that can be "
            "reached. Of a repository of GGUF files, name one of them: org/name/model-Q4_K_M.gguf."
        ) from error
    return found


def _read_adapter_config(name: str, config_file: str) -> dict[str, Any]:
    try:
        content = read_json(config_file)
        if not isinstance(content, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(content).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The {ADAPTER_CONFIG_NAME} of '{name[:500]}' cannot be read: {error}. Repair it, or remove the adapter from "
            "the folder."
        ) from error
    return content


def _base_named(name: str, config_file: str) -> str:
    base = _read_adapter_config(name, config_file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"'{name[:500]}' has an adapter and no model, and its {ADAPTER_CONFIG_NAME} does not say of which model "
            "(base_model_name_or_path). Open the base model, and load the adapter with model.load_adapter(...)."
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"'{name[:500]}' has an adapter of '{base[:500]}' and no model of its own, and PEFT is not installed. `pip install "
            f"peft`, or open '{base[:500]}' without the adapter."
        )
    return base


def _check_base(name: str, base: str) -> None:
    """Raise CheckpointError if an adapter's base model cannot be found, or is an adapter too."""
    remedy = f"change base_model_name_or_path in its {ADAPTER_CONFIG_NAME} to where that model is."
    try:
        own = _adapter_in(Path(base)) if is_folder(base) else _adapter_on_the_hub(base, {})
    except CheckpointError as error:
        raise CheckpointError(
            f"'{name[:500]}' has an adapter of '{base[:500]}' and no model of its own: {error} Or {remedy}"
        ) from error
    if own is not None:
        raise CheckpointError(
            f"'{name[:500]}' has an adapter of '{base[:500]}', which is an adapter too. Instead, {remedy}"
        )


def is_folder(name: str, subfolder: str = "") -> bool:
    """Return whether `name` is the folder of a checkpoint or of an adapter. Otherwise it may be a hub id.

    Args:
        name: a folder or a hub id.
        subfolder: the folder inside it that has the checkpoint.

    Raises:
        CheckpointError: it is a folder without a configuration, or a path that does not exist.
    """
    if os.path.isdir(name):
        folder = os.path.join(name, subfolder) if subfolder else name
        if not any(os.path.isfile(os.path.join(folder, config)) for config in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            raise CheckpointError(
                f"The folder '{folder[:500]}' has no {CONFIG_NAME}, so it is not a checkpoint of Transformers. Give the folder "
                "of a checkpoint."
            )
        return True
    if os.path.isfile(name):
        raise CheckpointError(
            f"'{name[:500]}' is a file. Give the folder of a checkpoint ({CONFIG_NAME} beside safetensors files), such as "
            f"'{(os.path.dirname(name) or '.')[:500]}', or a GGUF file. A .bin checkpoint has to be converted first: load it "
            "with Transformers and call model.save_pretrained(folder)."
        )
    if (
        not name.strip()
        or os.path.exists(name)
        or Path(name).is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    ):
        raise CheckpointError(
            f"There is no folder '{name[:500]}'. Give the folder of a checkpoint, one with a {CONFIG_NAME}, or a hub id such "
            "as org/name."
        )
    return False
