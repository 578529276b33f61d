"""Choose the class of Transformers that a checkpoint is opened with."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from promoe.errors import ConfigError
from promoe.model.hub import OF_THE_HUB

# Arguments of Transformers' `from_pretrained` that configurations have fields for, but which do more than set these.
_NO_FIELDS = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation")


def class_to_open(path_or_id: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Any:
    """Return the model class that the checkpoint's configuration names in `architectures`.

    If that is the family's causal language model, or a class that this version of Transformers does not have, return
    `AutoModelForCausalLM`.

    Args:
        path_or_id: folder of a checkpoint, or a hub id; None: the configuration is among `options`.
        options: as for `from_pretrained`.

    Raises:
        OSError: the configuration cannot be read.
        ValueError: Transformers does not know the model's family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = options.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        found = {name: options[name] for name in OF_THE_HUB if name in options}
        config = AutoConfig.from_pretrained(config or path_or_id, trust_remote_code=False, **found)
    mapping = AutoModelForCausalLM._model_mapping
    causal = mapping.get(type(config), None)
    named = _class_named(config)
    # Prefer the Auto class if it gives the same class, because it uses the text part's configuration of a model with
    # several parts.
    if named is None or named in (causal if isinstance(causal, (list, tuple)) else [causal]):
        return AutoModelForCausalLM
    return named


def model_class_of(auto_class: Any, config: Any) -> Any:
    """Return the model class that an Auto class has for a configuration; a model class is returned as it is.

    Raises:
        ConfigError: the Auto class has none.
    """
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is None:
        return auto_class
    found = mapping.get(type(config), None)
    classes = found if isinstance(found, (list, tuple)) else [found]
    if classes[0] is None:
        raise ConfigError(
            f"The 'auto_class' argument must be a class for {config.model_type}. Got {auto_class.__name__}, which has no such "
            "model. Leave it out, or pass transformers.AutoModelForCausalLM."
        )
    return classes[0]


def read_config(model_class: Any, path_or_id: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a checkpoint's configuration, changed by those `options` that are fields of it, and the other options.

    Args:
        model_class: of the model.
        path_or_id: folder of a checkpoint, or a hub id.
        options: as for `from_pretrained`.
    """
    fields = {name: value for name, value in options.items() if name not in _NO_FIELDS}
    config = model_class.config_class.from_pretrained(path_or_id, **fields)
    return config, {name: value for name, value in options.items() if name not in fields or not hasattr(config, name)}


def _class_named(config: Any) -> Any:
    """Return the first class in `architectures` that the family's module has; None: it has none of them."""
    from transformers import PreTrainedModel

    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    if module_name == type(config).__module__:
        return None
    module = importlib.import_module(module_name)
    names = getattr(config, "architectures", None)
    for name in names if isinstance(names, (list, tuple)) else ():
        found = getattr(module, str(name), None)
        is_own = isinstance(found, type) and found.__module__ == module_name and issubclass(found, PreTrainedModel)
        if is_own and not str(name).endswith("PreTrainedModel"):
            return found
    return None
