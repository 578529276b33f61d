"""Operations that a patched model refuses.

These are a change of its dtype or device, new weights for its experts, and saving weights that are not in memory. Each
is refused before anything is changed or written. Other parts of the model may be changed as usual.
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
from promoe.experts.moe_layers import MoELayer
from promoe.experts.requirements import is_peft_module
from promoe.transfer.lifetimes import if_alive

_NO_LOADING = (
    "A patched model cannot load a state_dict: slots hold copies of its experts' weights. "
    "Unpatch it, load the state_dict, and patch it again."
)
_NO_SAVING = (
    "This model's weights cannot be saved or copied: its experts are in files, not in memory. Nothing was written. Call "
    "promoe.unpatch(model) first, which reads all experts into memory. If promoe.from_pretrained opened the model, you can "
    "copy the checkpoint's folder instead."
)


def refuse_changes(model: nn.Module, layers: Sequence[MoELayer]) -> Callable[[], None]:
    """Make every module that contains experts refuse the operations named above, and return the undo.

    Saving is refused only if the experts are in files.
    """
    dtypes = {spec.dtype for layer in layers for spec in layer.layout.tensors}
    in_files = any(is_guard(parameter) for layer in layers for parameter in layer.parameters())
    with ExitStack() as undo:
        for module, paths in _containers(model, layers):
            undo.callback(_replace_method(module, "_apply", partial(_apply_unless_converting, dtypes)))
            undo.callback(module.register_load_state_dict_pre_hook(_NoNewWeights(paths)).remove)
            if in_files:
                undo.callback(_refuse_saving(module))
        for layer in layers if in_files else ():
            undo.callback(_refuse_saving(layer.experts))
        return undo.pop_all().close


def _containers(model: nn.Module, layers: Sequence[MoELayer]) -> list[tuple[nn.Module, list[str]]]:
    """Return every module that contains experts' weights, with the weights' paths inside it.

    These are the model, its list of layers, the blocks and so on, and the parts of an experts module. The experts
    module itself is left out, because its swapped class refuses the same operations.
    """
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
    """Replace a method of this module instance by a call of `wrapped(module, method, ...)`, and return the undo.

    The replacement refers to the module weakly. A bound method in the instance's dictionary would keep the module
    alive.
    """
    own, found = module.__dict__.get(name), weakref.ref(module)

    @functools.wraps(getattr(type(module), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        if alive is None:
            raise PatchStateError(
                f"This is a shallow copy of a patched model that was deleted: {name} needs the model itself. Keep the model."
            )
        return wrapped(alive, own or getattr(type(alive), name).__get__(alive), *args, **kwargs)

    def undo(module: nn.Module) -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    module.__dict__[name] = method
    return if_alive(module, undo)


def _apply_unless_converting(
    dtypes: Iterable[torch.dtype],
    module: nn.Module,
    apply: Callable[..., nn.Module],
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    refuse_conversion(fn, dtypes)
    return apply(fn, recurse)


def refuse_conversion(fn: Callable[[torch.Tensor], torch.Tensor], dtypes: Iterable[torch.dtype]) -> None:
    """Raise UnsupportedModelError if `fn`, which will be applied to all tensors, changes a dtype or the device."""
    for dtype in sorted(dtypes, key=str):
        probe = torch.empty(0, dtype=dtype, device="cpu")
        converted = fn(probe)
        if converted.dtype != dtype:
            raise UnsupportedModelError(
                f"A patched model cannot change its dtype ({dtype} to {converted.dtype}), because its slots and its store have "
                "the old one. Nothing was changed. Unpatch it first, or open it with the dtype you want."
            )
        if converted.device != probe.device:
            raise UnsupportedModelError(
                f"A patched model cannot move to {converted.device}: this version serves models on the CPU. Nothing was "
                "changed. Unpatch it first."
            )


class _NoNewWeights:
    """A hook of `load_state_dict` that refuses new weights for experts. As it cannot be copied, neither can the module."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def __call__(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        refuse_loading(self._paths, state_dict, prefix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PatchStateError(
            "A part of a patched model that contains experts cannot be copied or pickled. Unpatch it first (promoe.unpatch)."
        )


def refuse_loading(paths: Iterable[str], state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise PatchStateError if a state_dict has weights for experts.

    Weights of other modules may be loaded, for example those of an adapter.
    """
    if any(prefix + path in state_dict for path in paths):
        raise PatchStateError(_NO_LOADING)


def _refuse_saving(module: nn.Module) -> Callable[[], None]:
    """Refuse to save a module before a folder or a file is made, except an adapter's weights. Return the undo."""
    with ExitStack() as undo:
        undo.callback(module.register_state_dict_pre_hook(_refuse_state_dict).remove)
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(module, name):
                undo.callback(_replace_method(module, name, _save_unless_in_files))
        return undo.pop_all().close


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    # With `keep_vars` the caller needs names only. So do the functions that load or save an adapter, mostly through a
    # wrapper.
    if not keep_vars and not prefix and not any(map(is_peft_module, module.modules())):
        raise PatchStateError(_NO_SAVING)


def _save_unless_in_files(module: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None and not getattr(module, "_hf_peft_config_loaded", False):
        raise PatchStateError(_NO_SAVING)
    return save(*args, **kwargs)
