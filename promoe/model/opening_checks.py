"""What is refused when a model is opened without its experts, each with what to do instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from promoe.errors import CheckpointError, ConfigError, shown
from promoe.model.hub import base_of
from promoe.stores.base import check_chunk_bytes
from promoe.stores.checkpoint_plan import CONVERTIBLE_DTYPES
from promoe.stores.safetensors_files import check_files, locate_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Quantised formats (quant_method) that are dequantised on arrival.
DEQUANTISED = ("fp8", "mxfp4")
# In the names of what PEFT puts into a model.
_OF_ADAPTERS = ("lora_", "ia3_", "vera_", "modules_to_save", "trainable_tokens")
# Of a configuration. Models are built layer by layer before anything is compared with the files.
MAX_LAYERS = 4096
# Arguments of from_pretrained that go around this way of loading; what to do instead.
_REFUSED: dict[str, str] = {
    "trust_remote_code": "Only the models of the transformers package are supported; leave it out.",
    "quantization_config": "Experts are served as the checkpoint has them, dequantised on arrival; leave it out.",
    "load_in_4bit": "Experts are served as the checkpoint has them, dequantised on arrival; leave it out.",
    "load_in_8bit": "Experts are served as the checkpoint has them, dequantised on arrival; leave it out.",
    "gguf_file": "Only safetensors checkpoints are supported; convert it with model.save_pretrained(...) first.",
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
    """Before anything is read.

    Raises:
        ConfigError: an argument does not work with experts in files.
    """
    check_chunk_bytes(chunk_bytes)
    for name, remedy in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ConfigError(
                f"The {name!r} argument cannot be used when experts are left in files. Got {kwargs[name]!r}. {remedy}"
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
    except RuntimeError as error:  # one that this torch does not have
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
    """Before Transformers looks at the files, whose errors for damaged ones do not say what is wrong.

    Returns:
        Where the weights are: `path_or_id`, or, of an adapter alone, the base model that it names.

    Raises:
        CheckpointError: there is no such checkpoint, or it is a folder without sound safetensors files.
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
    for one in dtype.values() if isinstance(dtype, dict) else (dtype,):  # by part of the configuration
        known = getattr(torch, one, None) if isinstance(one, str) else one
        if not (one is None or one == "auto" or known in CONVERTIBLE_DTYPES):
            break
    else:
        return
    raise ConfigError(
        f"The 'dtype' argument must be a dtype of torch that models compute in, its name, \"auto\" or None: "
        f"{', '.join(str(one).removeprefix('torch.') for one in CONVERTIBLE_DTYPES)}. Got {dtype!r} instead. "
        'Pass torch.bfloat16, or "bfloat16", for example.'
    )


def prepare_config(path_or_id: Any, config: Any) -> None:
    """Before the weights are looked for: a quantised checkpoint is to be dequantised as Transformers would do it.

    Experts stay quantised in the files and are dequantised one by one when they arrive; the other weights when loaded.

    Raises:
        CheckpointError: it is quantised in another format, or has more layers than any model.
    """
    owners = [config, *(getattr(config, name, None) for name in ("text_config",))]
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
        method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
        if method not in DEQUANTISED:
            raise CheckpointError(
                f"The checkpoint {path_or_id} is quantised (quant_method {method}). Of quantised experts, those in "
                f"{' and '.join(DEQUANTISED)} can be served: open such a checkpoint, or an unquantised (BF16, F16 or F32) one."
            )
        fields["dequantize"] = True


def check_shapes(loading: Any, ignored: bool) -> None:
    """After the other weights were read. Raises CheckpointError where one has another shape than the model's."""
    if loading.mismatched_keys and not ignored:
        name, found, expected = min(loading.mismatched_keys)
        raise CheckpointError(
            f"The checkpoint's tensor for {name!r} has shape {list(found)}, but {list(expected)} was expected "
            f"({len(loading.mismatched_keys)} such tensors). The checkpoint is not of this model, or config.json was "
            "changed."
        )


def check_adapter(loading: Any, model: PreTrainedModel) -> None:
    """After an adapter's weights were read. Raises CheckpointError where some are missing, which Transformers makes up."""
    own = {name for name, _ in model.named_parameters() if any(mark in name for mark in _OF_ADAPTERS)}
    missing, unexpected = sorted(own & set(loading.missing_keys)), sorted(loading.unexpected_keys)
    if missing or unexpected:
        what = (
            f"has no tensor for {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model does not take"
        )
        raise CheckpointError(
            f"The adapter {what} ({len(missing)} missing, {len(unexpected)} that nothing takes): Transformers would make up "
            "what is missing. It is not whole, of another model, or of a kind that Transformers does not load (DoRA, for "
            "example). Open the base model alone, or merge the adapter with PEFT (merge_and_unload) and open what that saves."
        )


def check_missing(loading: Any, opened_as: type, config: Any) -> None:
    """When weights are tied. Raises CheckpointError for missing ones, which Transformers fills with random numbers.

    Args:
        loading: what Transformers says of the load.
        opened_as: the model's class.
        config: its configuration.
    """
    if not loading.missing_keys:
        return
    named = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
    raise CheckpointError(
        f"The checkpoint has no tensor for {min(loading.missing_keys)!r} ({len(loading.missing_keys)} tensors missing besides "
        f"experts). It was opened as {opened_as.__name__}, and its config.json names {named}. If it is of another class, pass "
        "that one, auto_class=transformers.AutoModelForSequenceClassification for example; else it is not complete, or "
        "config.json was changed."
    )
