"""`promoe.patch` and `promoe.unpatch`: plan, validate, and only then mutate."""

from __future__ import annotations

import warnings
from typing import Literal, TypeVar

import torch
from torch import nn

from promoe.config import PromoeConfig, checked_config
from promoe.errors import ConfigError, PatchStateError, UnsupportedModelError
from promoe.experts.moe_layers import MoELayer, check_module, find_moe_layers, model_type_of
from promoe.model import seam
from promoe.model.forwards import check_idle
from promoe.model.offloading import Offloaded
from promoe.model.placement import free_bytes, place
from promoe.runtime.assembly import LinkChoice, Parts, PredictorChoice, attach, check_choices, resolve_predictor
from promoe.runtime.resident import ResidentHandle
from promoe.runtime.sizes import CacheSize, plan_pools
from promoe.stores import HostStore
from promoe.transfer.devices import open_device
from promoe.transfer.links.free_ram import own_ram_bytes
from promoe.transfer.threads import check_interpreter

Model = TypeVar("Model", bound=nn.Module)
StoreChoice = Literal["auto", "host", "disk"]


def patch(
    model: Model,
    *,
    cache: CacheSize = "50%",
    predictor: PredictorChoice = "gate",
    store: StoreChoice = "auto",
    link: LinkChoice = "auto",
    device: str | torch.device = "cpu",
    config: PromoeConfig | None = None,
) -> Model:
    """Serve a model's routed experts from a fixed pool of slots, filled ahead of need. Output stays identical.

    Args:
        model: a Transformers model with MoE layers, in eval mode, on the CPU.
        cache: fast memory, the GPU's where it has the slots, for experts: "6GiB", "50%" of the routed experts, bytes, or "auto"
            (what is free, less 2 GiB).
        predictor: "gate", "previous", "popularity", "random", the folder or hub id of a trained one, a `Predictor`, or
            None for no prefetch.
        store: where experts always are: "host" (the model's own tensors), "disk", or "auto" ("host"). With "disk" they leave
            RAM: they are read from the checkpoint that the model was loaded from, if every expert there is the same, and else
            from files that are written now (`PromoeConfig.spool_folder`). `unpatch` reads them back. A checkpoint that is
            written to meanwhile is not read any more. With room for all experts in the cache they stay in RAM.
        link: "auto", "host" ("file" if they are on disk), or an `EmulatedLink`. Without a GPU, "auto" uses experts in RAM where
            they lie: they gain nothing from slots in RAM.
        device: "cuda" puts the slots and everything but the routed experts on the GPU; the experts stay in RAM, which is
            pinned where they lie. They are never all on the GPU.
        config: everything else, see `PromoeConfig`.

    Returns:
        The same object; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument cannot work.
        UnsupportedModelError: the model has no MoE layers that promoe can serve, or is not in a state to.
        PatchStateError: it is patched already, a forward of it is running, or its experts change meanwhile.
        CheckpointError: with `store="disk"`: a file is replaced meanwhile.

    Nothing is changed when an error is raised.
    """
    config = checked_config(config)
    check_interpreter()
    check_module(model)
    check_unpatched(model)
    if store not in ("auto", "host", "disk"):
        raise ConfigError(f'The \'store\' argument must be "auto", "host" or "disk". Got {store!r} instead.')
    on_disk = store == "disk"
    target = open_device(device)
    check_choices(predictor, link, on_disk=on_disk, on_device=target is not None)
    if target is not None and config.verify and not on_disk:
        raise ConfigError(
            f"verify={config.verify!r} compares experts in RAM, but a device copies them from where they lie. Leave it out, "
            "or open the model with promoe.from_pretrained."
        )
    layers = [layer.released() for layer in find_moe_layers(model)]
    check_state(model, layers)
    check_idle(model, layers)
    layouts, num_experts = [layer.layout for layer in layers], [layer.num_experts for layer in layers]
    freed_bytes = _freed_bytes(layers) if on_disk else 0
    free = free_bytes(model, layers, target)
    if free is not None and target is None:
        free += freed_bytes
    plans = plan_pools(cache, layouts, num_experts, free)
    chosen, name = resolve_predictor(predictor, layers, config, model_type_of(model))
    if not on_disk and target is None and link == "auto":
        warnings.warn(
            "The model is in RAM and there is no GPU: slots in RAM would gain nothing, so its experts are used where "
            'they lie. To run it with most of its experts on disk, patch it with store="disk", or open it with '
            "promoe.from_pretrained(path).",
            stacklevel=2,
        )
        model.promoe = ResidentHandle(type(model).__name__, layers, config, "host")  # type: ignore[assignment]
        return model
    all_fit = all(plan.spec.num_slots == sum(layers[i].num_experts for i in plan.spec.layers) for plan in plans)
    if target is None and all_fit and config.bypass:
        if on_disk:
            warnings.warn(
                f"The cache {cache!r} has slots for all experts: they stay in RAM, and are used where they lie. To take them "
                "out of it, choose a smaller cache.",
                stacklevel=2,
            )
        model.promoe = ResidentHandle(type(model).__name__, layers, config, "host")  # type: ignore[assignment]
        return model
    if target is not None and all_fit and config.bypass and not on_disk:
        placed = place(model, layers, target, with_experts=True)
        model.promoe = ResidentHandle(type(model).__name__, layers, config, "host", placed)  # type: ignore[assignment]
        return model
    if on_disk:
        offloaded = Offloaded(model, layers, config)
        with offloaded.guarded(model):
            parts = Parts(layers, offloaded.store, plans, config, chosen, name, target, freed_bytes)
            attach(model, parts, link, restore=offloaded.restore)
        return model
    host = HostStore([layer.rows() for layer in layers], config.longest_chunk(onto_device=target is not None))
    attach(model, Parts(layers, host, plans, config, chosen, name, target), link, restore=lambda: None)
    return model


def _freed_bytes(layers: list[MoELayer]) -> int:
    """RAM that is free once these layers' experts have left it: none of a checkpoint that is mapped, which is free already."""
    return min(sum(layer.num_experts * layer.layout.payload_bytes for layer in layers), own_ram_bytes() or 0)


def unpatch(model: Model) -> Model:
    """Undo `patch`: classes, hooks, attributes and threads are as before. A model whose experts are on disk, opened by
    `from_pretrained` or patched with `store="disk"`, gets all of them into RAM.

    Raises:
        PatchStateError: the model is not patched, or a forward of it is running; then nothing was changed.
        CheckpointError: experts could not be read from their files; the model stays patched.
    """
    handle = getattr(model, "promoe", None)
    if handle is None or not hasattr(handle, "detach"):
        raise PatchStateError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    handle.detach(model)
    return model


def check_unpatched(model: nn.Module) -> None:
    """Raise PatchStateError if the model, or a part of it, is patched."""
    if hasattr(model, "promoe") or any(seam.is_patched(module) for module in model.modules()):
        raise PatchStateError(
            f"This {type(model).__name__} is patched already. Call promoe.unpatch(model) first to change its settings."
        )


def check_state(model: nn.Module, layers: list[MoELayer]) -> None:
    """Raise UnsupportedModelError unless the model is on the CPU and in eval mode."""
    if model.training:
        raise UnsupportedModelError(
            "The model is in training mode; promoe serves inference only, because slots are overwritten while a "
            "backward pass would still need them. Call model.eval() first."
        )
    devices = sorted({str(tensor.device) for layer in layers for tensor in layer.parameters()})
    if devices != ["cpu"]:
        raise UnsupportedModelError(
            f'The model\'s experts are on {", ".join(devices)}; this version serves models on the CPU. Call model.to("cpu").'
        )
