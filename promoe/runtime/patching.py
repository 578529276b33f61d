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
    """Undo `patch`: classes, hooks, attributes and threads are as before.

    A model whose experts are on disk, opened by `from_pretrained` or patched with `store="disk"`, gets all of them into RAM.

    Raises:
        PatchStateError: the model is not patched, or a forward of it is running; then nothing was changed.
        CheckpointError: experts could not be read from their files; the model stays patched.
    """
    handle = getattr(model, "promoe", None)
    if not isinstance(handle, Handle):
        raise PatchStateError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    handle.detach(model)
    return model
