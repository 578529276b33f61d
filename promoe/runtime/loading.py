"""`promoe.from_pretrained`: a checkpoint opened with its experts left in its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from promoe.config import PromoeConfig, checked_config
from promoe.errors import CheckpointError, ConfigError, shown
from promoe.experts.moe_layers import model_type_of
from promoe.model.opening import Progress, open_without_experts
from promoe.model.packed_files import PackedChoice, open_packed
from promoe.model.placement import free_bytes
from promoe.model.restoring import load_all_experts
from promoe.runtime.assembly import LinkChoice, Parts, PredictorChoice, attach, check_choices, resolve_predictor
from promoe.runtime.resident import ResidentHandle
from promoe.runtime.sizes import CacheSize, check_cache, plan_pools
from promoe.stores.safetensors_files import remedy
from promoe.transfer.devices import open_device
from promoe.transfer.threads import check_interpreter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_pretrained(
    path_or_id: str | os.PathLike[str],
    *,
    cache: CacheSize = "50%",
    predictor: PredictorChoice = "gate",
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    link: LinkChoice = "auto",
    config: PromoeConfig | None = None,
    packed: PackedChoice = "auto",
    progress: Progress | None = None,
    auto_class: type | None = None,
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Open a safetensors checkpoint whose experts need not fit in memory.

    Everything but the routed experts is loaded. Expert weights are read from the checkpoint's own files, chunk by
    chunk, when they are needed or foreseen: no conversion step, no second copy. Output is identical to that of the
    model that Transformers' `from_pretrained` gives; in fp32, where bits depend on where weights begin in memory, to that of
    one whose weights begin at multiples of 64 bytes, as clones do.

    Args:
        path_or_id: folder of a checkpoint, or a hub id. Of an adapter alone (PEFT), the base model that it names is opened with
            it.
        cache: RAM (with `device="cuda"`, GPU memory) for experts: "6GiB", "50%" of the routed experts, bytes, or "auto" (what
            is free, less 2 GiB).
        predictor: "gate", "previous", "popularity", "random", the folder or hub id of a trained one, a `Predictor`, or
            None for no prefetch.
        dtype: of the weights; None: the checkpoint's. Experts of another dtype are converted on arrival.
        device: "cuda" puts the slots and everything but the routed experts on the GPU; experts come from the files, and stay in
            pinned RAM as far as it reaches (`PromoeConfig.pinned_bytes`).
        link: "auto" or "file" (read the files), or an `EmulatedLink`.
        config: everything else, see `PromoeConfig`.
        packed: folder of experts that `promoe pack` packed; "auto": that beside the checkpoint's files, if it is there and
            fits; None: read the checkpoint's own files. On a CPU only.
        progress: called as `progress(done_bytes, total_bytes)` while weights are loaded.
        auto_class: an Auto class or model class of Transformers to open it as: `AutoModelForCausalLM` for the text model alone
            of a model of text and images, for example. None: the class that config.json names (`architectures`).
        from_pretrained_kwargs: passed to Transformers' `from_pretrained` (attn_implementation, revision, ...).

    Returns:
        The model, in eval mode; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument cannot work.
        CheckpointError: files are missing, truncated or do not hold the model's experts.
        UnsupportedModelError: the model has no MoE layers that promoe can serve.
    """
    config = checked_config(config)
    if not isinstance(path_or_id, str | os.PathLike):
        raise ConfigError(f"The 'path_or_id' argument must be a folder or a hub id. Got {shown(path_or_id)} instead.")
    if packed is not None and not isinstance(packed, str | os.PathLike):
        raise ConfigError(f"The 'packed' argument must be a folder, \"auto\" or None. Got {shown(packed)} instead.")
    if progress is not None and not callable(progress):
        raise ConfigError(f"The 'progress' argument must be a function of two numbers. Got {shown(progress)} instead.")
    # What needs no model is checked before one is opened, which can take long.
    check_interpreter()
    target = open_device(device)
    check_cache(cache)
    check_choices(predictor, link, on_disk=True, on_device=target is not None)
    opened = open_without_experts(
        path_or_id,
        dtype=dtype,
        progress=progress,
        chunk_bytes=config.longest_chunk(),
        auto_class=auto_class,
        **from_pretrained_kwargs,
    )
    model, layers, plain = opened.model, [layer.released() for layer in opened.layers], opened.store
    del opened
    store = plain
    try:
        if target is None:
            store = open_packed(layers, plain, packed, config.longest_chunk())
        plans = plan_pools(cache, store.layouts, store.num_experts, free_bytes(model, layers, target))
        chosen, name = resolve_predictor(predictor, layers, config, model_type_of(model))
        all_fit = sum(plan.spec.num_slots for plan in plans) == sum(store.num_experts)
        if target is None and config.bypass and all_fit and store is plain:
            load_all_experts(layers, store, progress)
            store.close()
            model.promoe = ResidentHandle(type(model).__name__, layers, config, "memory")
            return model
        parts = Parts(layers, store, plans, config, chosen, name, target)
        attach(model, parts, link, restore=lambda: load_all_experts(layers, plain))
    except BaseException as error:
        store.close()
        if isinstance(error, OSError):  # a file went, or was replaced, since its header was read
            raise CheckpointError(f"Cannot open {path_or_id}: {error}. {remedy(error)}") from error
        raise
    return model
