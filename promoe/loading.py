"""`promoe.from_pretrained`: a checkpoint opened with its experts left in its files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from promoe.adapters.base import is_buffer, set_tensor
from promoe.assembly import LinkChoice, Parts, PredictorChoice, attach, check_choices, resolve_predictor
from promoe.config import PromoeConfig, checked_config
from promoe.devices import open_device
from promoe.errors import CheckpointError, ConfigError, shown
from promoe.moe_layers import MoELayer, model_type_of
from promoe.opening import Progress, open_without_experts
from promoe.packed_files import PackedChoice, open_packed
from promoe.placement import free_bytes
from promoe.resident import ResidentHandle
from promoe.scheduler import ExpertKey
from promoe.sizes import CacheSize, check_cache, plan_pools
from promoe.stores import Store
from promoe.stores.base import read_expert
from promoe.threads import check_interpreter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Readers that fill a model's memory when all its experts are loaded: enough to keep one disk busy.
LOADING_THREADS = 2


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
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Open a safetensors checkpoint whose experts need not fit in memory.

    Everything but the routed experts is loaded. Expert weights are read from the checkpoint's own files, chunk by
    chunk, when they are needed or foreseen: no conversion step, no second copy. Output is identical to the model that
    Transformers' `from_pretrained` gives.

    Args:
        path_or_id: folder of a checkpoint, or a hub id.
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
    # What needs no model is checked before one is opened, which can take long.
    check_interpreter()
    target = open_device(device)
    check_cache(cache)
    check_choices(predictor, link, on_disk=True, on_device=target is not None)
    opened = open_without_experts(
        path_or_id, dtype=dtype, progress=progress, chunk_bytes=config.chunk_bytes, **from_pretrained_kwargs
    )
    model, layers, plain = opened.model, opened.layers, opened.store
    store = plain
    try:
        if target is None:
            store = open_packed(layers, plain, packed, config.chunk_bytes)
        plans = plan_pools(cache, store.layouts, store.num_experts, free_bytes(model, layers, target))
        chosen, name = resolve_predictor(predictor, layers, config, model_type_of(model))
        all_fit = sum(plan.spec.num_slots for plan in plans) == sum(store.num_experts)
        if target is None and config.bypass and all_fit and store is plain:
            load_all_experts(layers, store, progress)
            store.close()
            model.promoe = ResidentHandle(model, layers, config, "memory")
            return model
        parts = Parts(layers, store, plans, config, chosen, name, target)
        attach(model, parts, link, restore=lambda: load_all_experts(layers, plain))
    except BaseException as error:
        store.close()
        if isinstance(error, OSError):  # a file went, or was replaced, since its header was read
            raise CheckpointError(f"Cannot open {path_or_id}: {error}. Try again.") from error
        raise
    return model


def load_all_experts(layers: Sequence[MoELayer], store: Store, progress: Progress | None = None) -> None:
    """Replace every guarded expert parameter by a real one, read from the store; all of them or none.

    Raises:
        CheckpointError: bytes cannot be read.
    """
    banks, done_bytes = [], 0
    for layer in layers:
        try:
            banks.append(_read_layer(layer, store))
        except OSError as error:
            raise CheckpointError(
                f"The experts of {layer.name!r} could not be read: {error}. Nothing was changed: mend the cause and try again."
            ) from error
        done_bytes += layer.num_experts * layer.layout.payload_bytes
        if progress is not None:
            progress(done_bytes, store.expert_bytes)
    for layer, bank in zip(layers, banks, strict=True):
        # Guards do not say whether the weights would be trained; the gate beside them does.
        requires_grad = any(parameter.requires_grad for parameter in layer.gate.parameters())
        for path, loaded in bank.items():
            keep = is_buffer(layer.experts, path)
            set_tensor(layer.experts, path, loaded if keep else nn.Parameter(loaded, requires_grad))


def _read_layer(layer: MoELayer, store: Store) -> dict[str, torch.Tensor]:
    """What is to be registered at each of the layer's paths."""
    loaded: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    with torch.inference_mode(False):  # ordinary tensors, wherever we are called
        for tensor in layer.tensors:
            # Zeros, as a stack may have rows that belong to no expert.
            parts = [torch.zeros(tensor.stack_shape, dtype=tensor.dtype) for _ in tensor.paths]
            loaded |= zip(tensor.paths, parts, strict=True)
            rows[tensor.name] = tensor.split(parts, layer.num_experts)

    def load(expert_idx: int) -> None:
        slot = memoryview(bytearray(layer.layout.slot_bytes))
        read_expert(store, ExpertKey(layer.layer_idx, expert_idx), slot)
        for spec in layer.layout.tensors:
            source = torch.frombuffer(
                slot, dtype=spec.dtype, count=spec.nbytes // spec.dtype.itemsize, offset=spec.offset_bytes
            )
            rows[spec.name][expert_idx].copy_(source.view(spec.shape))

    with ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="promoe-load") as threads:
        list(threads.map(load, range(layer.num_experts)))
    return loaded
