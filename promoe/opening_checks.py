"""What is refused when a model is opened without its experts, each with what to do instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from promoe.errors import CheckpointError, ConfigError, shown
from promoe.hub import check_found, check_has_config
from promoe.stores.base import check_chunk_bytes
from promoe.stores.safetensors_files import SafetensorsFiles, locate_files

# Quantised formats (quant_method) that are dequantised on arrival.
DEQUANTISED = ("fp8", "mxfp4")
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


def check_arguments(path_or_id: str | os.PathLike[str], chunk_bytes: int, kwargs: Mapping[str, Any]) -> None:
    """Before anything is read.

    Raises:
        ConfigError: an argument does not work with experts in files.
        CheckpointError: a local checkpoint is not a folder of sound safetensors files.
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
    name, has_config = os.fspath(path_or_id), kwargs.get("config") is not None
    if os.path.isfile(name):
        raise CheckpointError(
            f"{name} is a file; the folder of a checkpoint (config.json beside safetensors files) or a hub id is "
            "needed. Pass its folder; convert a .bin or GGUF checkpoint with model.save_pretrained(folder) first."
        )
    if os.path.isdir(name):
        folder = Path(name, kwargs.get("subfolder") or "")
        if not has_config:
            check_has_config(folder)
        if not kwargs.get("variant"):
            # Before Transformers looks at the files: its errors for damaged ones do not say what is wrong.
            SafetensorsFiles.open(*locate_files(folder)).close()
    elif not has_config or not name.strip():
        check_found(name, kwargs)


def check_dtype(dtype: Any) -> None:
    """Before anything is read.

    Raises:
        ConfigError: it is no dtype that weights can be computed with.
    """
    for one in dtype.values() if isinstance(dtype, dict) else (dtype,):  # by part of the configuration
        known = getattr(torch, one, None) if isinstance(one, str) else one
        if not (one is None or one == "auto" or (isinstance(known, torch.dtype) and known.is_floating_point)):
            break
    else:
        return
    raise ConfigError(
        f"The 'dtype' argument must be a floating-point dtype of torch, its name, \"auto\" or None. Got {dtype!r} instead. "
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


def check_missing(loading: Any) -> None:
    """When weights are tied. Raises CheckpointError for missing ones, which Transformers fills with random numbers."""
    if loading.missing_keys:
        raise CheckpointError(
            f"The checkpoint has no tensor for {min(loading.missing_keys)!r} ({len(loading.missing_keys)} tensors "
            "missing besides experts). It is not complete, not of this model, or config.json was changed."
        )
