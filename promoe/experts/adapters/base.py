"""The base class of adapters: where an expert's tensors are, how the experts module is called, and its loop.

The rest of promoe knows one form of a call, `hidden[T, H]`, `index[T, K]`, `weights[T, K]` -> `[T, H']`, and one form
of an expert, named tensors. An adapter translates a family's own form into it and back, without changing a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from promoe.errors import PatchStateError
from promoe.experts.gate_output import gate_indices

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of an expert, and the parameters or buffers in which the module keeps it for all its experts.

    Attributes:
        name: the path of the parameter, or the path inside the expert if every expert has a parameter of its own.
        shape: shape of one expert's tensor.
        dtype: dtype of all experts' tensors.
        paths: paths inside the experts module: one parameter that stacks all experts, or one parameter per expert.
        stack_shape: shape of each of these parameters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    paths: tuple[str, ...]
    stack_shape: tuple[int, ...]

    @classmethod
    def stack(cls, path: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> ExpertTensor:
        """Describe a parameter that stacks all experts. `shape` is one expert's shape, by default that of a row."""
        return cls(path, shape or tuple(tensor.shape[1:]), tensor.dtype, (path,), tuple(tensor.shape))

    def rows(self, experts: nn.Module, num_experts: int) -> torch.Tensor | list[torch.Tensor]:
        """Return this tensor of every expert, not copied: `[num_experts, *shape]`, or a list of `num_experts` tensors."""
        tensors = [get_tensor(experts, path) for path in self.paths]
        return self.split(tensors, num_experts)

    def split(self, tensors: Sequence[torch.Tensor], num_experts: int) -> torch.Tensor | list[torch.Tensor]:
        """Return this tensor of every expert, as `rows` does, from parameters that are or could be at `paths`."""
        if len(tensors) > 1:
            return list(tensors)
        if tuple(tensors[0].shape) == (num_experts, *self.shape):
            return tensors[0]
        return tensors[0].detach().view(-1, *self.shape)[:num_experts]

    def rest(self, tensors: Sequence[torch.Tensor], num_experts: int) -> torch.Tensor:
        """Return the elements of the stack `[n]` that belong to no expert. Mostly there are none."""
        own = num_experts * math.prod(self.shape) // len(tensors)
        return tensors[0].detach().view(-1)[own:] if tensors[0].numel() > own else tensors[0].new_empty(0)


class Adapter:
    """Knows the form of a family's experts modules. The defaults fit a plain loop over stacked experts.

    An adapter has no state: each method is passed the module that it is about.
    """

    sums_rows: ClassVar[bool] = True
    """Whether the experts' forward adds up a token's rows. Otherwise every row of its input has one expert and one row of
    its output."""

    implementations: ClassVar[tuple[str, ...]] = ("eager", "batched_mm", "grouped_mm")
    """The experts implementations of Transformers that can run over slots, the best one last."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    """The dtypes that the experts' tensors may have."""

    stacks: ClassVar[tuple[str, ...]] = ()
    """Paths of the stacked parameters, if `tensors` is not overridden."""

    def problem(self, experts: nn.Module) -> str | None:
        """Return why the module cannot be served; None: it can be; "": it does not resemble experts."""
        return None

    def num_experts(self, experts: nn.Module) -> int:
        """Return E, the number of experts with weights. They have the ids 0..E-1."""
        count: int = experts.num_experts  # type: ignore[assignment]
        return count

    def num_ids(self, experts: nn.Module) -> int:
        """Return the number of ids. Ids from E on need no weights."""
        return self.num_experts(experts)

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """Return the tensors of an expert, in the module's order."""
        return tuple(ExpertTensor.stack(path, get_tensor(experts, path)) for path in self.stacks)

    def implementation(self, experts: nn.Module) -> str:
        """Return the current experts implementation, as Transformers calls it."""
        return "eager"

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the family's own loop, `(stand-in, hidden[T, H], index[T, K], weights[T, K]) -> [T, H']`.

        It is the same function object for all modules with the same code.
        """
        return stock_forward(type(experts))

    def stand_in(self, experts: nn.Module, banks: Mapping[str, Any]) -> nn.Module:
        """Return a stand-in for the module's `self` for one call, with `banks` in place of its tensors, by name."""
        return module_with(experts, banks)

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """Return a forward with the module's own arguments and result that computes through `run`.

        The module will refer to it, so it must not refer to the module.
        """
        return run

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """Return the ids `[T, K]` that the gate's output chooses; None if they cannot be read from it."""
        return gate_indices(output)


def stock_forward(cls: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """Return the forward of a class as Transformers has it, also for a class that promoe swapped in."""
    base: Any = getattr(cls, "_promoe_base", cls)
    forward: Callable[..., torch.Tensor] = base.forward
    return forward


def owner_of(experts: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Return the registry (dict) in which the parameter or buffer at `path` is registered, and its name there."""
    prefix, _, name = path.rpartition(".")
    owner = experts.get_submodule(prefix)
    return (owner._buffers if name in owner._buffers else owner._parameters), name


def get_tensor(experts: nn.Module, path: str) -> torch.Tensor:
    """Return the parameter or buffer at `path`."""
    registry, name = owner_of(experts, path)
    tensor: torch.Tensor = registry[name]
    return tensor


def is_buffer(experts: nn.Module, path: str) -> bool:
    """Return whether the tensor at `path` is a buffer."""
    prefix, _, name = path.rpartition(".")
    return name in experts.get_submodule(prefix)._buffers


def set_tensor(experts: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer at `path`."""
    registry, name = owner_of(experts, path)
    registry[name] = tensor


def part_with(part: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """Return a stand-in for a part of an experts module, with `tensors` in place of its own parameters.

    Raises:
        PatchStateError: the part lacks one of these parameters now, so it would compute with others.
    """
    if not part._parameters.keys() >= tensors.keys():
        raise changed_since(f"put a {type(part).__name__} into a module of experts")
    return module_with(part, tensors)


def changed_since(how: str) -> PatchStateError:
    """Return the error to raise if experts were replaced after patching."""
    return PatchStateError(
        f"After patching, something {how}, as an adapter does. Slots would not contain what it adds to the experts. "
        "Unpatch the model, merge the adapter (PeftModel.merge_and_unload()), and patch it again."
    )


def all_paths(tensors: tuple[ExpertTensor, ...]) -> Iterator[str]:
    """Yield the paths of the parameters and buffers of all tensors, in order."""
    for tensor in tensors:
        yield from tensor.paths


def module_with(module: nn.Module, overlay: Mapping[str, Any]) -> nn.Module:
    """Return a stand-in for `module`, for one call, with the attributes in `overlay` in place of its own.

    It shares everything else with the module as it is now (submodules, flags, methods).
    """
    stand_in: nn.Module = object.__new__(type(module))
    # An instance attribute hides a registered parameter, because nn.Module looks into its registries last.
    attributes = stand_in.__dict__
    attributes.update(module.__dict__)
    attributes.pop("forward", None)  # a forward of the instance would be bound to the module
    attributes.update(overlay)
    return stand_in
