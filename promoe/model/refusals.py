"""What a patched model refuses: another dtype or device, new weights for its experts, saving what it does not have.

Each before anything of the model was changed, or anything written; other parts of the model may change as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from promoe.errors import PatchStateError, UnsupportedModelError
from promoe.experts.guard import is_guard
from promoe.experts.moe_layers import MoELayer, is_adapter
from promoe.transfer.lifetimes import if_alive

_NO_LOADING = (
    "A patched model cannot load a state_dict: slots hold copies of its experts' weights. "
    "Unpatch it, load, and patch it again."
)
_NO_SAVING = (
    "This model's weights cannot be saved or copied: its experts are in files, not in memory. Nothing was written. Call "
    "promoe.unpatch(model) first, which reads all experts into memory; of a model that promoe.from_pretrained opened, the "
    "checkpoint's folder can be copied instead."
)


def refuse_changes(model: nn.Module, layers: Sequence[MoELayer]) -> Callable[[], None]:
    """Refuse another dtype or device and new weights for experts, on whatever contains some, before anything of it was
    changed; and to save a model whose experts are in files, before anything was written.

    Returns the undo.
    """
    dtypes = {spec.dtype for layer in layers for spec in layer.layout.tensors}
    in_files = any(is_guard(parameter) for layer in layers for parameter in layer.parameters())
    with ExitStack() as undo:
        for module, paths in _containers(model, layers):
            undo.callback(_replace_method(module, "_apply", partial(_same_form_only, dtypes)))
            undo.callback(module.register_load_state_dict_pre_hook(_NoNewWeights(paths)).remove)
            if in_files:
                undo.callback(_refuse_saving(module))
        for layer in layers if in_files else ():
            undo.callback(_refuse_saving(layer.experts))
        return undo.pop_all().close


def _containers(model: nn.Module, layers: Sequence[MoELayer]) -> list[tuple[nn.Module, list[str]]]:
    """Every module with experts' weights somewhere in it, and where: the model, its stack of layers, the blocks, ...; also
    parts of an experts module, but not that itself, whose class takes care."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        for path in layer.paths:
            parts = f"{layer.name}.{path}".split(".")
            for depth in range(len(parts)):
                found.setdefault(".".join(parts[:depth]), []).append(".".join(parts[depth:]))
    for layer in layers:
        del found[layer.name]
    return [(model.get_submodule(name), paths) for name, paths in found.items()]


def _replace_method(module: nn.Module, name: str, wrapped: Callable[..., Any]) -> Callable[[], None]:
    """Have `wrapped(module, method, ...)` called in place of a module's method, on this instance. Returns the undo.

    A bound method in the instance's own dictionary would keep the module alive.
    """
    own, found = module.__dict__.get(name), weakref.ref(module)

    @functools.wraps(getattr(type(module), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        if alive is None:
            raise PatchStateError(
                f"This is a shallow copy of a patched model that is gone: {name} needs the model itself. Keep the model."
            )
        return wrapped(alive, own or getattr(type(alive), name).__get__(alive), *args, **kwargs)

    def undo(module: nn.Module) -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    module.__dict__[name] = method
    return if_alive(module, undo)


def _same_form_only(
    dtypes: Iterable[torch.dtype],
    module: nn.Module,
    apply: Callable[..., nn.Module],
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    refuse_conversion(fn, dtypes)
    return apply(fn, recurse)


def refuse_conversion(fn: Callable[[torch.Tensor], torch.Tensor], dtypes: Iterable[torch.dtype]) -> None:
    """Raise UnsupportedModelError if `fn`, which is about to be applied to all tensors, gives another dtype or device."""
    for dtype in sorted(dtypes, key=str):
        probe = torch.empty(0, dtype=dtype, device="cpu")
        converted = fn(probe)
        if converted.dtype != dtype:
            raise UnsupportedModelError(
                f"A patched model cannot change its dtype ({dtype} to {converted.dtype}): its slots and its store have "
                "it. Nothing was changed. Unpatch it first, or open it with the dtype you want."
            )
        if converted.device != probe.device:
            raise UnsupportedModelError(
                f"A patched model cannot move to {converted.device}: this version serves models on the CPU. Nothing was "
                "changed. Unpatch it first."
            )


class _NoNewWeights:
    """A hook of `load_state_dict`. It also is what refuses to copy the module, whose hooks are ours."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def __call__(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        refuse_loading(self._paths, state_dict, prefix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PatchStateError(
            "No part of a patched model that holds experts can be copied or pickled. Unpatch it first (promoe.unpatch)."
        )


def refuse_loading(paths: Iterable[str], state_dict: Mapping[str, Any], prefix: str) -> None:
    """Weights of other modules may be loaded, as those of an adapter are."""
    if any(prefix + path in state_dict for path in paths):
        raise PatchStateError(_NO_LOADING)


def _refuse_saving(module: nn.Module) -> Callable[[], None]:
    """Before a folder is made or a file begun. An adapter's weights may be saved. Returns the undo."""
    with ExitStack() as undo:
        undo.callback(module.register_state_dict_pre_hook(_refuse_state_dict).remove)
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(module, name):
                undo.callback(_replace_method(module, name, _unless_in_files))
        return undo.pop_all().close


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    # With `keep_vars`, and by what loads or saves an adapter (mostly through a wrapper), it is asked for names only.
    if not keep_vars and not prefix and not any(map(is_adapter, module.modules())):
        raise PatchStateError(_NO_SAVING)


def _unless_in_files(module: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None and not getattr(module, "_hf_peft_config_loaded", False):
        raise PatchStateError(_NO_SAVING)
    return save(*args, **kwargs)
