"""Asking a gate out of its turn: with another layer's input, and with what else it wants to be called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .base import LayerVisit


class GateCaller:
    """Calls the gates of a model as their blocks would.

    Besides its input a gate may take what belongs to it (a correction bias), which is kept from its own last call, and
    what belongs to the tokens (their ids, the router's state), which comes from the visit, if that is to a gate of the same
    class. A gate that wants something of the tokens which the visit does not have cannot be asked; nor can one that draws
    random numbers, as then the model would draw others.
    """

    def __init__(self, gates: Sequence[nn.Module]) -> None:
        self._gates = gates
        self._last: dict[int, LayerVisit] = {}
        self._draws: dict[int, bool] = {}  # of the layers that were asked

    def saw(self, visit: LayerVisit) -> None:
        """Remember how the visited gate was called."""
        if visit.gate_args or visit.gate_kwargs:
            self._last[visit.layer_idx] = visit

    def ask(self, layer_idx: int, visit: LayerVisit) -> Any:
        """What the layer's gate returns for the visit's input; None if it cannot be asked."""
        gate, own = self._gates[layer_idx], self._last.get(layer_idx)
        args, kwargs = visit.gate_args, visit.gate_kwargs
        if type(gate) is not type(self._gates[visit.layer_idx]):
            args, kwargs = (own.gate_args, own.gate_kwargs) if own else ((), {})
            if own is not None and any(map(own.is_of_tokens, (*args, *kwargs.values()))):
                return None
        elif own is not None:
            args = tuple(a if visit.is_of_tokens(a) else b for a, b in zip(args, own.gate_args, strict=True))
            kwargs = {name: a if visit.is_of_tokens(a) else own.gate_kwargs[name] for name, a in kwargs.items()}
        hidden = visit.gate_input.view(*(visit.token_shape or (-1,)), visit.gate_input.shape[1])
        # Not gate(...): that would fire its hooks, ours and the recorder of router logits.
        return self._without_chance(layer_idx, partial(type(gate).forward, gate, hidden, *args, **kwargs))

    def _without_chance(self, layer_idx: int, forward: Callable[[], Any]) -> Any:
        """What `forward` returns; None, as soon as it asks for a random number."""
        draws = self._draws.get(layer_idx)
        if draws is None:
            try:
                with _NoChance():  # type: ignore[no-untyped-call]
                    output = forward()
            except _Draws:
                self._draws[layer_idx] = True
                return None
            self._draws[layer_idx] = False
            return output
        return None if draws else forward()


class _Draws(Exception):
    """A random number was asked for."""


class _NoChance(TorchDispatchMode):
    """Raises before a random number is drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Draws
        return func(*args, **(kwargs or {}))
