"""Which class of Transformers a checkpoint is to be opened as."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from promoe.hub import OF_THE_HUB


def class_to_open(path_or_id: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """`AutoModelForCausalLM`, where it knows the checkpoint's configuration; else the model class that this names.

    Args:
        path_or_id: folder of a checkpoint, or a hub id.
        options: as for `from_pretrained`.

    Raises:
        OSError: there is no configuration to read.
        ValueError: it is of no model that Transformers has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = options.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        found = {name: options[name] for name in OF_THE_HUB if name in options}
        config = AutoConfig.from_pretrained(config or path_or_id, trust_remote_code=False, **found)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        module_name = type(config).__module__.replace(".configuration_", ".modeling_")
        if module_name != type(config).__module__:
            module = importlib.import_module(module_name)
            for name in getattr(config, "architectures", None) or ():
                if hasattr(module, name):
                    return getattr(module, name)
    return AutoModelForCausalLM
