"""`promoe.patch` and `promoe.unpatch`. Everything is checked and planned before the model is changed."""

from __future__ import annotations

import warnings
from typing import Literal, TypeVar

import torch
from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PatchStateError, shown
from promoe.experts.kernels.formats import FORMATS, QUANTIZED, SlotFormat
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
    experts: Literal["auto", "int8", "int4", "int3", "int2"] = "auto",
    cache: CacheSize = "50%",
    predictor: PredictorChoice = "gate",
    store: StoreChoice = "auto",
    link: LinkChoice = "auto",
    device: str | torch.device = "cpu",
    config: PromoeConfig | None = None,
) -> Model:
    """Serve a model's routed experts from a fixed pool of slots that is filled ahead of need. The output stays identical.

    If an error is raised, the model is unchanged.

    Args:
        model: a Transformers model with MoE layers, in eval mode, on the CPU.
        experts: the form of the experts. "auto": as the model has them. "int8", "int4", "int3", "int2": quantised, with
            `store="disk"`; they are then written to new files in this form (`PromoeConfig.spool_folder`). This changes
            the output: it is that of the same model with all experts in this form in memory; with `device="cuda"`,
            that of the model whose experts are expanded from it to bf16. `unpatch` gives the model its own experts back.
        cache: fast memory for experts (GPU memory if the slots are there): "6GiB", "50%" of the routed experts, a
            number of bytes, "auto" (all free memory except 2 GiB), or "2 per layer" (slots that belong to one layer
            each).
        predictor: "gate", "correlation", "previous", "popularity", "random", a trained one's folder or hub id, a
            `Predictor` object, or None for no prefetching.
        store: where all experts are kept: "host" (the model's own tensors), "disk", or "auto" (the same as "host").
            "disk" frees their RAM. They are then read from the checkpoint that the model was loaded from, if every
            expert in it is the same as in the model; otherwise they are written to new files
            (`PromoeConfig.spool_folder`). `unpatch` reads them back. If somebody writes to the checkpoint's files
            later, reading them raises an error. If the cache has room for all experts, they stay in RAM.
        link: "auto", "host" ("file" for experts on disk), or an `EmulatedLink`. Without a GPU, "auto" uses experts in
            RAM in place, because slots in RAM would gain nothing.
        device: "cuda" puts the slots and everything except the routed experts on the GPU. The experts stay in RAM,
            which is pinned in place; the GPU never holds all of them.
        config: all other settings, see `PromoeConfig`.

    Returns:
        The same model object; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument is invalid, alone or together with others.
        UnsupportedModelError: the model has no MoE layers that promoe can serve, or is in training mode or not on the
            CPU.
        PatchStateError: the model is patched already, a forward of it is running, or its experts were changed during
            the call.
        CheckpointError: with `store="disk"`, a file was replaced during the call.
    """
    if store not in ("auto", "host", "disk"):
        raise ConfigError(f'The \'store\' argument must be "auto", "host" or "disk". Got {store!r} instead.')
    on_disk = store == "disk"
    slot_format = _slot_format(experts, on_disk)
    checked = check(Arguments(cache, predictor, link, device, config), on_disk)
    found = find_in_ram(model, on_disk, slot_format)
    plan = plan_slots(found, checked)
    if not plan.pools and checked.device is None and (why := _why_in_place(checked, on_disk)):
        warnings.warn(why, stacklevel=2)
    serve(found, plan, checked)
    return model


def _slot_format(experts: str, on_disk: bool) -> SlotFormat | None:
    """Return the slot format that was asked for; None: plain.

    Raises:
        ConfigError: there is no such format, or it cannot be served from where the experts are kept.
    """
    if experts == "auto":
        return None
    if experts not in QUANTIZED:
        raise ConfigError(
            f"The 'experts' argument of patch must be \"auto\" or one of {', '.join(QUANTIZED)}. Got {shown(experts)} instead. "
            "(A folder is opened by promoe.from_pretrained.)"
        )
    if not on_disk:
        raise ConfigError(f'experts="{experts}" needs store="disk": quantised experts are kept in files and in slots.')
    return FORMATS[experts]


def _why_in_place(checked: Checked, on_disk: bool) -> str | None:
    """Return a warning if all experts are used in place although the caller may have expected slots; else None."""
    if on_disk:
        return (
            f"The cache {checked.asked.cache!r} has slots for all experts, so they stay in RAM and are used in place. "
            "To move them out of RAM, choose a smaller cache."
        )
    if checked.asked.link != "auto":
        return None
    return (
        "The model is in RAM and no GPU is used. Slots in RAM would gain nothing, so its experts are used in place. To "
        'run it with most of its experts on disk, patch it with store="disk", or open it with promoe.from_pretrained(path).'
    )


def unpatch(model: Model) -> Model:
    """Undo `patch`: restore the model's classes, hooks and attributes, and stop all threads.

    If the model's experts are on disk (opened by `from_pretrained`, or patched with `store="disk"`), all of them are
    read into RAM.

    Raises:
        PatchStateError: the model is not patched, or a forward of it is running. Nothing was changed.
        CheckpointError: experts could not be read from their files. The model stays patched.
    """
    handle = getattr(model, "promoe", None)
    if not isinstance(handle, Handle):
        raise PatchStateError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    handle.detach(model)
    return model
