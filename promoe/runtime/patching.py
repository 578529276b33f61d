"""`promoe.patch` and `promoe.unpatch`: plan, validate, and only then mutate."""

from __future__ import annotations

import warnings
from typing import Literal, TypeVar

import torch
from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PatchStateError
from promoe.runtime.checking import Arguments, Checked, LinkChoice, PredictorChoice, check
from promoe.runtime.finding import find_in_ram
from promoe.runtime.handle import Handle
from promoe.runtime.serving import serve
from promoe.runtime.sizes import CacheSize
from promoe.runtime.slot_plan import plan_slots

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
    """Serve a model's routed experts from a fixed pool of slots, and prefetch them. The output stays identical.

    Args:
        model: a Transformers model with MoE layers, in eval mode, on the CPU.
        cache: fast memory (with `device="cuda"`, GPU memory) for experts: "6GiB", "50%" of the routed experts, bytes, or "auto"
            (the free memory minus 2 GiB).
        predictor: "gate", "previous", "popularity", "random", the folder or hub id of a trained predictor, a `Predictor`
            object, or None for no prefetch.
        store: where all experts are kept: "host" (the model's own tensors), "disk", or "auto" ("host"). "disk" frees their RAM.
            If the checkpoint that the model was loaded from holds the same experts, they are read from there; otherwise they
            are written to files first (`PromoeConfig.spool_folder`). `unpatch` reads them back. Do not write to that
            checkpoint meanwhile. If the cache has room for all experts, they stay in RAM.
        link: "auto", "host" (with experts on disk, "file"), or an `EmulatedLink`. Without a GPU, "auto" uses experts in RAM
            where they are, since they gain nothing from slots in RAM.
        device: "cuda" puts the slots and everything but the routed experts on the GPU. The experts stay in pinned RAM.
        config: all other settings.

    Returns:
        The same object; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument has a wrong value.
        UnsupportedModelError: promoe cannot serve this model, or not in its present state.
        PatchStateError: the model is already patched, a forward of it is running, or its experts change meanwhile.
        CheckpointError: with `store="disk"`, a file was replaced meanwhile.

    After an error, the model is unchanged.
    """
    if store not in ("auto", "host", "disk"):
        raise ConfigError(f'The \'store\' argument must be "auto", "host" or "disk". Got {store!r} instead.')
    on_disk = store == "disk"
    checked = check(Arguments(cache, predictor, link, device, config), on_disk)
    found = find_in_ram(model, on_disk)
    plan = plan_slots(found, checked)
    if not plan.pools and checked.device is None and (why := _why_in_place(checked, on_disk)):
        warnings.warn(why, stacklevel=2)
    serve(found, plan, checked)
    return model


def _why_in_place(checked: Checked, on_disk: bool) -> str | None:
    """Return what to say of experts that are used where they lie, where that may surprise."""
    if on_disk:
        return (
            f"The cache {checked.asked.cache!r} has slots for all experts: they stay in RAM, and are used where they lie. "
            "To take them out of RAM, choose a smaller cache."
        )
    if checked.asked.link != "auto":
        return None
    return (
        "The model is in RAM and there is no GPU: slots in RAM would gain nothing, so its experts are used where they lie. To "
        'run it with most of its experts on disk, patch it with store="disk", or open it with promoe.from_pretrained(path).'
    )


def unpatch(model: Model) -> Model:
    """Undo `patch`: restore classes, hooks and attributes, and end all threads.

    A model whose experts are on disk, from `from_pretrained` or `store="disk"`, gets all of them into RAM.

    Raises:
        PatchStateError: the model is not patched, or a forward of it is running. The model is unchanged.
        CheckpointError: experts could not be read from their files. The model stays patched.
    """
    handle = getattr(model, "promoe", None)
    if not isinstance(handle, Handle):
        raise PatchStateError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    handle.detach(model)
    return model
