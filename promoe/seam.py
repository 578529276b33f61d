"""Attaching to and detaching from the modules of a Transformers model. Every attach has its exact undo.

The experts module's class is swapped, per instance, for a subclass whose forward goes to the runtime; its gate gets a
forward hook. Names, parameters, state_dict and the module tree stay as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from promoe.adapters import Run
from promoe.adapters.base import owner_of
from promoe.errors import PatchStateError, UnsupportedModelError
from promoe.moe_layers import MoELayer

RunExperts = Callable[..., torch.Tensor]
GateTap = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
_RUN = "_promoe_run"
_BANKS = "_promoe_banks"
_NO_LOADING = (
    "A patched model cannot load a state_dict: slots hold copies of its experts' weights. "
    "Unpatch it, load, and patch it again."
)


@functools.cache
def patched_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an experts class that runs its experts through promoe; same name, module and qualname."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        run: RunExperts = self.__dict__[_RUN]
        return run(*args, **kwargs)

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return _apply_without_banks(base, self, fn, recurse)

    def __deepcopy__(self: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
        raise PatchStateError("A patched model cannot be copied: its experts are not in memory. Unpatch it, then copy.")

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:
        raise PatchStateError(
            "A patched model cannot be pickled: its experts are not in memory. Unpatch it, then save."
        )

    def _load_from_state_dict(self: nn.Module, *args: Any) -> None:
        raise PatchStateError(_NO_LOADING)

    return type(
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


def is_patched(module: nn.Module) -> bool:
    """Whether this module's class was swapped."""
    return hasattr(type(module), "_promoe_base")


def attach(layer: MoELayer, run: Run, tap: GateTap) -> Callable[[], None]:
    """Swap the class of a layer's experts, so that they compute through `run`, and tap its gate. Returns the undo."""
    experts = layer.experts
    base = type(experts)
    assert not is_patched(experts), layer.name
    with ExitStack() as undo:  # an error or Ctrl-C in between takes back what was done
        undo.callback(layer.gate.register_forward_hook(tap, with_kwargs=True).remove)
        undo.callback(lambda: setattr(experts, "__class__", base))
        experts.__class__ = patched_class(base)  # type: ignore[arg-type]
        undo.callback(experts.__dict__.pop, _RUN, None)
        experts.__dict__[_RUN] = layer.adapter.call(experts, run)
        undo.callback(experts.__dict__.pop, _BANKS, None)
        experts.__dict__[_BANKS] = layer.paths
        return undo.pop_all().close


def _apply_without_banks(
    base: type[nn.Module], module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> nn.Module:
    """`module.to(...)` and its like leave the experts' weights where they are."""
    owners = [owner_of(module, path) for path in module.__dict__[_BANKS]]
    before = [(registry, dict(registry)) for registry in {id(registry): registry for registry, _ in owners}.values()]
    banks = [(registry, name, registry.pop(name)) for registry, name in owners]
    try:
        some = banks[0][2]
        probe = torch.empty(0, dtype=some.dtype)
        if fn(probe).dtype != probe.dtype:
            raise UnsupportedModelError(
                f"A patched model cannot change its dtype ({probe.dtype}): its slots and store have it. "
                "Unpatch it first, or open it with the dtype you want."
            )
        result: nn.Module = base._apply(module, fn, recurse)
        return result
    finally:
        # In the old order: state_dict() and parameters() list them so.
        for registry, names in before:
            moved = dict(registry)
            registry.clear()
            registry.update({name: moved.get(name, names[name]) for name in names})


def refuse_changes(model: nn.Module, layers: Sequence[MoELayer]) -> Callable[[], None]:
    """Refuse another dtype and `load_state_dict` on whatever contains experts, before anything of it was changed.

    Returns the undo.
    """
    dtypes = sorted({spec.dtype for layer in layers for spec in layer.layout.tensors}, key=str)
    with ExitStack() as undo:
        for module in _containers(model, layers):
            undo.callback(module.__dict__.pop, "_apply", None)
            module.__dict__["_apply"] = _same_dtype_only(module._apply, dtypes)
            undo.callback(module.register_load_state_dict_pre_hook(_refuse_loading).remove)
        return undo.pop_all().close


def _containers(model: nn.Module, layers: Sequence[MoELayer]) -> list[nn.Module]:
    """Every module that contains one of the layers' experts modules: the model, its stack of layers, the blocks, ..."""
    parts = [layer.name.split(".") for layer in layers]
    names = dict.fromkeys(".".join(path[:depth]) for path in parts for depth in range(len(path)))
    return [model.get_submodule(name) for name in names]


def _same_dtype_only(apply: Callable[..., nn.Module], dtypes: Sequence[torch.dtype]) -> Callable[..., nn.Module]:
    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if any(fn(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in dtypes):
            raise UnsupportedModelError(
                f"A patched model cannot change its dtype ({', '.join(map(str, dtypes))}). Nothing was changed. "
                "Unpatch it first, or open it with the dtype you want."
            )
        return apply(fn, recurse)

    return _apply


def _refuse_loading(*args: Any) -> None:
    raise PatchStateError(f"{_NO_LOADING} Nothing was changed.")
