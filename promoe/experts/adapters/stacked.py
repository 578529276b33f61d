"""The contract that nearly every family follows: each tensor of the experts is in one stacked parameter `[E, ...]`.

A module is recognised by its properties, never by its name: its forward takes `(hidden[T, H], index[T, K],
weights[T, K])`, and all its direct parameters are stacks with one row per expert. If its class is decorated with
Transformers' `use_experts_implementation`, it can also run on faster kernels.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from .base import Adapter, ExpertTensor, stock_forward

_DECORATOR_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


class StackedAdapter(Adapter):
    """The adapter of experts in stacked parameters that are called with hidden states, ids and weights."""

    dimensions: ClassVar[tuple[int, ...]] = (2, 3)
    """Numbers of dimensions that a stack may have, including that of the experts."""

    def problem(self, experts: nn.Module) -> str | None:
        """Return what the module lacks to meet the contract; None: nothing; "": it does not resemble experts."""
        if not is_decorated(experts) and not _has_the_contracts_arguments(experts):
            return "it is not built with use_experts_implementation" if _resembles_experts(experts) else ""
        if not isinstance(getattr(experts, "num_experts", None), int):
            return f"it does not say how many there are (num_experts is {getattr(experts, 'num_experts', None)!r})"
        arguments = list(inspect.signature(self.loop(experts)).parameters.values())[1:]
        if len(arguments) < 3 or any(a.default is a.empty for a in arguments[3:]):
            return f"its forward takes ({', '.join(a.name for a in arguments)}) instead of (hidden, index, weights)"
        shapes = {name: tuple(tensor.shape) for name, tensor in _direct_tensors(experts)}
        if not any(len(shape) == 3 for shape in shapes.values()):
            return f"it has no stacked weights [num_experts, ., .]; its tensors: {shapes}"
        for name, shape in shapes.items():
            if len(shape) not in self.dimensions or shape[0] != experts.num_experts:
                dimensions = " or ".join(map(str, self.dimensions))
                return f"{name} has shape {shape} where [{experts.num_experts}, ...] with {dimensions} dimensions is expected"
        return None

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """Return every direct parameter and buffer."""
        return tuple(ExpertTensor.stack(name, tensor) for name, tensor in _direct_tensors(experts))

    def implementation(self, experts: nn.Module) -> str:
        """Return the implementation that the config names now, or "eager" if the class has no other kernels."""
        if not is_decorated(experts):
            return "eager"
        return str(getattr(experts.config, "_experts_implementation", None) or "eager")

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the undecorated forward."""
        decorated = _decorated_forward(type(experts))
        if decorated is None:
            return stock_forward(type(experts))
        # Unwrap all decorators, because some quantisers decorate a class once per layer.
        core: Callable[..., torch.Tensor] = inspect.unwrap(decorated)
        return core


def is_decorated(experts: nn.Module) -> bool:
    """Return whether the module's kernels can be chosen, because `use_experts_implementation` decorates its class."""
    return _decorated_forward(type(experts)) is not None and all(hasattr(experts, mark) for mark in _DECORATOR_MARKS)


def _decorated_forward(cls: type) -> Callable[..., Any] | None:
    """Return the nearest forward in the class hierarchy that wraps another one; None: there is none.

    Subclasses that replaced it are passed over, so that a patched module is still recognised.
    """
    for base in cls.__mro__:
        forward = base.__dict__.get("forward")
        if hasattr(forward, "__wrapped__"):
            return forward
    return None


def _has_the_contracts_arguments(module: nn.Module) -> bool:
    return tuple(inspect.signature(stock_forward(type(module))).parameters)[1:] == _ARGUMENTS


def _resembles_experts(module: nn.Module) -> bool:
    return re.search(r"Experts\d*$", type(module).__name__) is not None


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
