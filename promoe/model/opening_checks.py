"""What can go wrong when a model is opened without its experts: checks before, during and after the load, and its errors.

Each message says what to do instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError, shown
from promoe.model.hub import base_of
from promoe.stores.base import check_chunk_bytes
from promoe.stores.checkpoint_plan import CONVERTIBLE_DTYPES, CheckpointPlan
from promoe.stores.encodings.base import StoredTensor
from promoe.stores.encodings.companions import check_companions, undecoded
from promoe.stores.encodings.refused import refusal
from promoe.stores.encodings.schemes import SCHEMES
from promoe.stores.tensor_files import check_files, locate_files, remedy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of the names of the parameters that PEFT adds to a model.
_OF_ADAPTERS = ("lora_", "ia3_", "vera_", "modules_to_save", "trainable_tokens")
# A config.json with more layers is damaged. Models are built layer by layer before anything is compared with the files.
MAX_LAYERS = 4096
# Arguments of from_pretrained that do not work with experts in files, and what to do instead.
_QUANTISE = 'Use experts="int4" (`promoe quantize`) for the experts. The other weights stay as they are; leave it out.'
_REFUSED: dict[str, str] = {
    "trust_remote_code": "Only the models of the transformers package are supported; leave it out.",
    "quantization_config": _QUANTISE,
    "load_in_4bit": _QUANTISE,
    "load_in_8bit": _QUANTISE,
    "device_map": "Open the model on the CPU; leave it out.",
    "max_memory": "It belongs to device_map; leave it out and set the cache size instead.",
    "offload_folder": "The experts stay in the checkpoint's own files; leave it out.",
    "state_dict": "The weights are read from the checkpoint's files; leave it out.",
    "distributed_config": "Sharded models are not supported; leave it out.",
    "device_mesh": "Sharded models are not supported; leave it out.",
    "tp_plan": "Sharded models are not supported; leave it out.",
    "tp_size": "Sharded models are not supported; leave it out.",
    "use_kernels": "Hub kernels replace the experts' forward; leave it out.",
    "kernel_config": "Hub kernels replace the experts' forward; leave it out.",
    "store": "The experts of an opened model stay in its files; leave it out, or promoe.patch a model in RAM.",
    "output_loading_info": "Only the model is returned; leave it out.",
}


def check_arguments(chunk_bytes: int, dtype: Any, auto_class: Any, kwargs: Mapping[str, Any]) -> None:
    """Check the arguments, before anything is read.

    Raises:
        ConfigError: an argument does not work with experts in files.
    """
    check_chunk_bytes(chunk_bytes)
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ConfigError(
                f"The {name!r} argument cannot be used when experts are left in files. Got {kwargs[name]!r}. {instead}"
            )
    if kwargs.get("use_safetensors") is False:
        raise ConfigError(
            "The 'use_safetensors' argument must be True: experts are read from safetensors files only. Got False."
        )
    _check_dtype(dtype)
    if auto_class is not None and not (
        hasattr(auto_class, "_model_mapping") or hasattr(auto_class, "_load_pretrained_model")
    ):
        raise ConfigError(
            "The 'auto_class' argument must be an Auto class or model class of Transformers, such as "
            f"transformers.AutoModelForCausalLM. Got {shown(auto_class)} instead."
        )
    try:
        where = torch.get_default_device()
    except RuntimeError as error:  # this build of torch does not have it
        raise ConfigError(
            f"The default device of torch cannot be used: {error}. Call torch.set_default_device('cpu')."
        ) from error
    if where.type != "cpu":
        raise ConfigError(
            f"A checkpoint cannot be opened while torch makes new tensors on the device '{where}' (torch.set_default_device, "
            "or `with torch.device(...)`). Open it outside of that"
            + (" context." if where.type == "meta" else f", with promoe.from_pretrained(..., device='{where}').")
        )


def check_checkpoint(path_or_id: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> str:
    """Check the checkpoint's files before Transformers reads them, because its errors do not say which file is damaged.

    Returns:
        Where the weights are: `path_or_id`, or the base model if there is only an adapter.

    Raises:
        CheckpointError: there is no such checkpoint, or its folder has missing or damaged safetensors files.
    """
    name, config = os.fspath(path_or_id), kwargs.get("config")
    if config is None or os.path.isfile(name) or not name.strip():
        name = base_of(name, kwargs)
    if os.path.isdir(name) and not kwargs.get("variant"):
        weights_name = kwargs.get("transformers_weights") or getattr(config, "transformers_weights", None)
        folder = Path(name, kwargs.get("subfolder") or "")
        check_files(locate_files(folder, weights_name, from_config=config is None))
    return name


def _check_dtype(dtype: Any) -> None:
    for one in dtype.values() if isinstance(dtype, dict) else (dtype,):  # a dict has one for each part of the model
        known = getattr(torch, one, None) if isinstance(one, str) else one
        if one is None or one == "auto" or known in CONVERTIBLE_DTYPES:
            continue
        raise ConfigError(
            f"The 'dtype' argument must be a dtype of torch that models compute in, its name, \"auto\" or None: "
            f"{', '.join(str(each).removeprefix('torch.') for each in CONVERTIBLE_DTYPES)}. Got {dtype!r} instead. "
            'Pass torch.bfloat16, or "bfloat16", for example.'
        )


def take_quantization(path_or_id: Any, config: Any) -> Mapping[str, Any] | None:
    """Check the configuration of a checkpoint. Remove from it how the checkpoint is quantised, and return that.

    Transformers then takes the checkpoint for one in 16 bits. Its weights are decoded when they are read: experts one by
    one as they arrive, the others when they are loaded.

    Returns:
        The `quantization_config`, with its `quant_method` as a string; None: the checkpoint is not quantised.

    Raises:
        CheckpointError: the checkpoint is quantised in an unsupported format, or has more layers than any model.
    """
    found: Mapping[str, Any] | None = None
    owners: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for owner in owners:
        for field, value in getattr(owner, "__dict__", {}).items():
            if "layers" in field and isinstance(value, int) and value > MAX_LAYERS:
                raise CheckpointError(
                    f"The config.json of {path_or_id} says {field} = {shown(value)}, more than {MAX_LAYERS}. It is damaged."
                )
        quantisation = getattr(owner, "quantization_config", None)
        if not quantisation:
            continue
        fields = quantisation if isinstance(quantisation, dict) else vars(quantisation)
        method = fields.get("quant_method")
        method = str(getattr(method, "value", method))
        if method == "None" and "group_size" in fields:  # MLX does not say so
            method = "mlx"
        if method not in SCHEMES:
            raise CheckpointError(
                f"The checkpoint {path_or_id} is quantised (quant_method {method[:60]}), in a way that cannot be read. "
                f"{refusal(method)} Supported quantised formats: {', '.join(SCHEMES)}, and unquantised ones (BF16, F16 or F32)."
            )
        found = found or {**fields, "quant_method": method}
        del owner.quantization_config
    return found


def check_decoded(model: PreTrainedModel, plan: CheckpointPlan, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError if a weight other than an expert's would be loaded as its codes, or without all of its parts.

    Args:
        model: the model on the meta device.
        plan: of the checkpoint.
        tensors: all tensors of the checkpoint, by the names that they would have in 16 bits.
    """
    parameters = model.state_dict()
    for name, tensor in plan.not_floats.items():
        if name in parameters and parameters[name].is_floating_point():
            raise undecoded(tensor, tensors, f"{name} {list(parameters[name].shape)} {parameters[name].dtype}")
    check_companions(tensors, plan.unused_tensors)


def check_shapes(loading: Any, ignored: bool) -> None:
    """Raise CheckpointError if a weight that was read has another shape than the model's parameter."""
    if loading.mismatched_keys and not ignored:
        name, found, expected = min(loading.mismatched_keys)
        raise CheckpointError(
            f"The checkpoint's tensor for {name!r} has shape {list(found)}, but {list(expected)} was expected "
            f"({len(loading.mismatched_keys)} such tensors). The checkpoint is not of this model, or config.json was "
            "changed."
        )


def check_adapter(loading: Any, model: PreTrainedModel) -> None:
    """Raise CheckpointError if an adapter's file lacks weights, for which Transformers would use random numbers."""
    own = {name for name, _ in model.named_parameters() if any(mark in name for mark in _OF_ADAPTERS)}
    missing, unexpected = sorted(own & set(loading.missing_keys)), sorted(loading.unexpected_keys)
    if missing or unexpected:
        what = (
            f"has no tensor for {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model does not take"
        )
        raise CheckpointError(
            f"The adapter {what} ({len(missing)} missing, {len(unexpected)} unknown). Transformers would use random numbers "
            "for missing weights. The adapter is incomplete, belongs to another model, or is of a kind that Transformers does "
            "not load (DoRA, for example). Open the base model alone, or merge the adapter with PEFT (merge_and_unload) and "
            "open the merged model."
        )


def check_missing(loading: Any, opened_as: type, config: Any) -> None:
    """Raise CheckpointError if weights are missing. Transformers would fill them with random numbers.

    Args:
        loading: Transformers' record of the load, after it has tied the weights.
        opened_as: the model's class.
        config: the model's configuration.
    """
    if not loading.missing_keys:
        return
    named = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
    raise CheckpointError(
        f"The checkpoint has no tensor for {min(loading.missing_keys)!r} ({len(loading.missing_keys)} tensors missing besides "
        f"experts). It was opened as {opened_as.__name__}, and its config.json names {named}. If it is a checkpoint of another "
        "class, pass that class, for example auto_class=transformers.AutoModelForSequenceClassification. Otherwise it is "
        "incomplete, or config.json was changed."
    )


def opening_error(
    error: Exception,
    path_or_id: str | os.PathLike[str],
    kwargs: Mapping[str, Any],
    asked_class: type | None,
    model_class: type | None,
    is_loaded: bool,
) -> PromoeError:
    """Return the error to raise in place of one that Transformers raised while it opened a checkpoint.

    Args:
        error: what Transformers raised.
        path_or_id: what was to be opened.
        kwargs: arguments that were passed on to Transformers.
        asked_class: the class whose `from_pretrained` was called; None: it was not known yet.
        model_class: the class of the model; None: Transformers had not chosen it yet.
        is_loaded: whether the model's own weights had been loaded.
    """
    text = str(error)[:2000].rstrip(". ")
    if isinstance(error, OSError):
        return CheckpointError(f"Cannot open {path_or_id}: {text}. {remedy(error) if error.errno else ''}".rstrip())
    if (argument_error := _argument_error(error, text, path_or_id, kwargs)) is not None:
        return argument_error
    name = getattr(model_class or asked_class, "__name__", "a model")
    if isinstance(error, ValueError) and model_class is None:
        return UnsupportedModelError(f"Cannot open {path_or_id} as {name}: {error}")
    if is_loaded:
        return CheckpointError(
            f"Cannot open {path_or_id}: its weights were loaded, but not what Transformers loads after them (an adapter, "
            f"generation_config.json): {type(error).__name__}: {text}. Repair it, or remove it from the folder."
        )
    # Transformers and the models compute with the values of config.json before anything compares them with the files.
    return CheckpointError(
        f"Cannot open {path_or_id} as {name}: {type(error).__name__}: {text}. If {name}.from_pretrained of Transformers "
        "raises the same error, config.json or the arguments are wrong. Otherwise please report it as a fault of promoe."
    )


def _argument_error(
    error: Exception, text: str, path_or_id: str | os.PathLike[str], kwargs: Mapping[str, Any]
) -> ConfigError | None:
    """Return the error to raise if an argument was the cause; None: the message does not name an argument."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if isinstance(error, TypeError) and unknown and unknown[1] in kwargs:
        return ConfigError(
            f"Cannot open {path_or_id}: {text}. Neither promoe.from_pretrained nor Transformers has this argument: "
            "check its spelling."
        )
    given = ", ".join(f"{name}={shown(value)}" for name, value in kwargs.items())
    if isinstance(error, ImportError) and given:
        return ConfigError(
            f"Cannot open {path_or_id} with {given}: {text}. Install what it names, or change these arguments."
        )
    named = [name for name in kwargs if any(form in text for form in (f"{name}=", f"`{name}`", f"'{name}'"))]
    if isinstance(error, (TypeError, ValueError)) and named:
        arguments = ", ".join(f"{name}={shown(kwargs[name])}" for name in named)
        return ConfigError(f"Cannot open {path_or_id} with {arguments}: {text}. Change it, or leave it out.")
    return None
