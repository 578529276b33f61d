"""Calls a gate before its turn: on another layer's input, with the further arguments that it needs."""

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

    Besides its input, a gate may take arguments of its own (a correction bias): those of its latest call are used again.
    And it may take arguments that belong to the tokens (their ids, the router's state): those come from the visit, if the
    visited gate is of the same class. A gate cannot be asked if it needs something of the tokens that the visit does not
    have, or if it draws random numbers, because the model would then draw others.
    """

    def __init__(self, gates: Sequence[nn.Module]) -> None:
        self._gates = gates
        self._last: dict[int, LayerVisit] = {}
        self._draws: dict[int, bool] = {}  # layer -> whether its gate draws random numbers, once it was asked

    def saw(self, visit: LayerVisit) -> None:
        """Remember how the visited gate was called."""
        if visit.gate_args or visit.gate_kwargs:
            self._last[visit.layer_idx] = visit

    def ask(self, layer_idx: int, visit: LayerVisit) -> Any:
        """Return the output of the layer's gate for the visit's input; None if it cannot be asked."""
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
        """Return the result of `forward`; None, if it asks for a random number."""
        draws = self._draws.get(layer_idx)
        if draws is None:
            try:
                with _NoRandomNumbers():  # type: ignore[no-untyped-call]
                    output = forward()
            except _RandomNumberWanted:
                self._draws[layer_idx] = True
                return None
            self._draws[layer_idx] = False
            return output
        return None if draws else forward()


class _RandomNumberWanted(Exception):
    """A gate asked for a random number."""


class _NoRandomNumbers(TorchDispatchMode):
    """A mode in which every operation that would draw a random number raises instead."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RandomNumberWanted
        return func(*args, **(kwargs or {}))
