"""Attach to the modules of a Transformers model, and detach from them. Every attach has an exact undo.

The class of an experts module is swapped, on the instance, for a subclass whose forward calls the runtime. The gate
gets a forward hook. Names, parameters, state_dict and the module tree stay as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn

from promoe.errors import PatchStateError
from promoe.experts.adapters import Run
from promoe.experts.adapters.base import changed_since, owner_of
from promoe.experts.moe_layers import MoELayer
from promoe.experts.requirements import runs_its_class_forward
from promoe.model.refusals import refuse_conversion, refuse_loading
from promoe.transfer.lifetimes import if_alive

RunExperts = Callable[..., torch.Tensor]
GateTap = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
_RUN = "_promoe_run"
_BANKS = "_promoe_banks"


@functools.cache
def patched_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of an experts class that runs the experts through promoe, with the name and module of `base`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        run: RunExperts | None = self.__dict__.get(_RUN)
        if run is None:  # the module was unpatched, and a wrapper that somebody put around this forward still calls it
            unpatched: torch.Tensor = base.forward(self, *args, **kwargs)
            return unpatched
        if type(self) is not swapped:
            raise changed_since(f"changed the class of {base.__name__} to {type(self).__name__}")
        return run(*args, **kwargs)

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return _apply_without_banks(base, self, fn, recurse)

    def __deepcopy__(self: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
        raise PatchStateError("A patched model cannot be copied: its experts are not in memory. Unpatch it, then copy.")

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:
        raise PatchStateError(
            "A patched model cannot be pickled: its experts are not in memory. Unpatch it, then save."
        )

    def _load_from_state_dict(self: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        refuse_loading(self.__dict__[_BANKS], state_dict, prefix)
        base._load_from_state_dict(self, state_dict, prefix, *args)

    forward._promoe_base = base  # type: ignore[attr-defined]
    swapped = type(
        base.__name__,
        (base,),
        {
            "forward": forward,
            "_apply": _apply,
            "__deepcopy__": __deepcopy__,
            "__reduce_ex__": __reduce_ex__,
            "_load_from_state_dict": _load_from_state_dict,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "_promoe_base": base,
        },
    )
    return swapped


def is_patched(module: nn.Module) -> bool:
    """Return whether this module's class was swapped."""
    return hasattr(type(module), "_promoe_base")


def attach(layer: MoELayer, run: Run, tap: GateTap) -> Callable[[], None]:
    """Make a layer's experts compute through `run` by swapping their class, and hook `tap` to the gate.

    Returns the undo. The module keeps `run` alive. Neither `run` nor the undo may keep the module alive. Otherwise the
    two would refer to each other, and only a garbage collection would free the module.
    """
    experts = layer.experts
    base = type(experts)
    assert not is_patched(experts), layer.name
    with ExitStack() as undo:  # an error or Ctrl-C during these steps undoes the ones that were done
        undo.callback(layer.gate.register_forward_hook(tap, with_kwargs=True).remove)
        undo.callback(if_alive(experts, lambda experts: setattr(experts, "__class__", base)))
        experts.__class__ = patched_class(base)  # type: ignore[arg-type]
        undo.callback(_bind_leftover_forward(experts))
        undo.callback(if_alive(experts, lambda experts: experts.__dict__.pop(_RUN, None)))
        experts.__dict__[_RUN] = layer.adapter.call(experts, run)
        undo.callback(if_alive(experts, lambda experts: experts.__dict__.pop(_BANKS, None)))
        experts.__dict__[_BANKS] = layer.paths
        return undo.pop_all().close


def _bind_leftover_forward(experts: nn.Module) -> Callable[[], None]:
    """Bind a forward in the instance's dictionary to the present class. Return the undo.

    When accelerate removes a hook it leaves a forward in the instance, which would hide the swapped class's forward.
    """
    left = experts.__dict__.get("forward")
    if left is None:
        return lambda: None
    shown = experts.__dict__["forward"] = MethodType(type(experts).forward, experts)

    def undo(experts: nn.Module) -> None:
        if experts.__dict__.get("forward") is shown:  # otherwise somebody has wrapped it since
            experts.__dict__["forward"] = left

    return if_alive(experts, undo)


def was_replaced(model: nn.Module, layer: MoELayer, block_forward: Callable[..., Any]) -> bool:
    """Return whether the experts or their block were replaced or wrapped, so that a pass may not call the experts.

    Args:
        model: the patched model.
        layer: one of its layers.
        block_forward: the forward of the block's class at the time of patching.
    """
    block, experts = layer.block, layer.experts
    try:
        in_place = model.get_submodule(layer.block_name) is block and model.get_submodule(layer.name) is experts
    except AttributeError:
        in_place = False
    wrapped = "_hf_hook" in block.__dict__  # accelerate's wrapper calls the block's own forward
    unchanged = type(block).forward is block_forward and (wrapped or runs_its_class_forward(block))
    return not (in_place and unchanged and runs_its_class_forward(experts))


def _apply_without_banks(
    base: type[nn.Module], module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> nn.Module:
    """Apply `fn`, as `module.to(...)` and similar methods do, to all tensors except the experts' weights."""
    owners = [owner_of(module, path) for path in module.__dict__[_BANKS]]
    refuse_conversion(fn, {registry[name].dtype for registry, name in owners})
    before = [(registry, dict(registry)) for registry in {id(registry): registry for registry, _ in owners}.values()]
    for registry, name in owners:
        del registry[name]
    try:
        result: nn.Module = base._apply(module, fn, recurse)
        return result
    finally:
        # Restore the old order, in which state_dict() and parameters() list them.
        for registry, names in before:
            moved = dict(registry)
            registry.clear()
            registry.update({name: moved.get(name, names[name]) for name in names})
