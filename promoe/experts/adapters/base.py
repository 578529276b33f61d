"""What differs between kinds of experts modules: where an expert's tensors are, how the module is called, and its loop.

The rest of promoe knows one form of a call: `hidden[T, H]`, `index[T, K]`, `weights[T, K]` -> `[T, H']`, and one form of an
expert: named tensors. An adapter translates a family's own form into it and back, without changing a bit.
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
    """One tensor of an expert, and the parameters or buffers in which the module keeps it for all of its experts.

    Attributes:
        name: of the tensor; the path of its parameter, or, where every expert has its own, the path inside the expert.
        shape: of one expert's tensor.
        dtype: of all of them.
        paths: inside the experts module: one parameter with all experts one after the other, or one per expert.
        stack_shape: of each of these parameters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    paths: tuple[str, ...]
    stack_shape: tuple[int, ...]

    @classmethod
    def stack(cls, path: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> ExpertTensor:
        """All experts one after the other in `tensor`; `shape` is one expert's, by default a row's."""
        return cls(path, shape or tuple(tensor.shape[1:]), tensor.dtype, (path,), tuple(tensor.shape))

    def rows(self, experts: nn.Module, num_experts: int) -> torch.Tensor | list[torch.Tensor]:
        """The tensor of every expert, without a copy: `[num_experts, *shape]`, or a list of `num_experts` tensors."""
        tensors = [get_tensor(experts, path) for path in self.paths]
        return self.split(tensors, num_experts)

    def split(self, tensors: Sequence[torch.Tensor], num_experts: int) -> torch.Tensor | list[torch.Tensor]:
        """The same of what is, or could be, registered at `paths`."""
        if len(tensors) > 1:
            return list(tensors)
        if tuple(tensors[0].shape) == (num_experts, *self.shape):
            return tensors[0]
        return tensors[0].detach().view(-1, *self.shape)[:num_experts]

    def rest(self, tensors: Sequence[torch.Tensor], num_experts: int) -> torch.Tensor:
        """Of what is registered at `paths`: the numbers, one after the other, that belong to no expert. Mostly none."""
        own = num_experts * math.prod(self.shape) // len(tensors)
        return tensors[0].detach().view(-1)[own:] if tensors[0].numel() > own else tensors[0].new_empty(0)


class Adapter:
    """The form of a family's experts modules; the defaults are those of a plain loop over stacked experts.

    Stateless: everything is asked about the module that is given.
    """

    sums_rows: ClassVar[bool] = True
    """Whether a token's rows are added up in the experts' forward. Else every row of its input has one expert and one
    row of its output."""

    implementations: ClassVar[tuple[str, ...]] = ("eager", "batched_mm", "grouped_mm")
    """The kernels that can run over slots, as Transformers calls them; the best one last."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    """That the experts' tensors may have."""

    def problem(self, experts: nn.Module) -> str | None:
        """Why a module of this kind cannot be served; None: it can. "" is for what is no module of experts at all."""
        return None

    def num_experts(self, experts: nn.Module) -> int:
        """E: experts with weights, of ids 0..E-1."""
        count: int = experts.num_experts  # type: ignore[assignment]
        return count

    def num_ids(self, experts: nn.Module) -> int:
        """How many ids there are; those from E on need no weights."""
        return self.num_experts(experts)

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """An expert's tensors, in the module's order."""
        raise NotImplementedError

    def implementation(self, experts: nn.Module) -> str:
        """Name of the kernel in force now, as Transformers calls it."""
        return "eager"

    def loop(self, experts: nn.Module) -> Callable[..., torch.Tensor]:
        """The family's own loop, `(stand-in, hidden[T, H], index[T, K], weights[T, K]) -> [T, H']`.

        The same object for all modules with the same code.
        """
        return stock_forward(type(experts))

    def stand_in(self, experts: nn.Module, banks: Mapping[str, Any]) -> nn.Module:
        """What plays the module's `self` for one call; `banks` play its stacked tensors, by name."""
        return module_with(experts, banks)

    def call(self, experts: nn.Module, run: Run) -> Callable[..., torch.Tensor]:
        """A forward with the module's own arguments and result that computes through `run`.

        The module will hold it, so it must not hold the module.
        """
        return run

    def chosen(self, gate: nn.Module, block: nn.Module, output: Any) -> torch.Tensor | None:
        """The ids `[T, K]` that the gate's output stands for; None if it does not tell."""
        return gate_indices(output)


def stock_forward(cls: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """The forward of a class as Transformers has it, also of one that promoe swapped in."""
    base: Any = getattr(cls, "_promoe_base", cls)
    forward: Callable[..., torch.Tensor] = base.forward
    return forward


def owner_of(experts: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Where a parameter or buffer of the module is registered: the registry, and its name there."""
    prefix, _, name = path.rpartition(".")
    owner = experts.get_submodule(prefix)
    return (owner._buffers if name in owner._buffers else owner._parameters), name


def get_tensor(experts: nn.Module, path: str) -> torch.Tensor:
    """A parameter or buffer of the module."""
    registry, name = owner_of(experts, path)
    tensor: torch.Tensor = registry[name]
    return tensor


def is_buffer(experts: nn.Module, path: str) -> bool:
    """Whether what is registered there is a buffer."""
    prefix, _, name = path.rpartition(".")
    return name in experts.get_submodule(prefix)._buffers


def set_tensor(experts: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of the module; nothing else of it changes."""
    registry, name = owner_of(experts, path)
    registry[name] = tensor


def part_with(part: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """A stand-in for a part of an experts module, with these in place of its own parameters.

    Raises:
        PatchStateError: it does not have them itself any more, so that it would compute with others.
    """
    if not part._parameters.keys() >= tensors.keys():
        raise changed_since(f"put a {type(part).__name__} into a module of experts")
    return module_with(part, tensors)


def changed_since(how: str) -> PatchStateError:
    """What to raise where experts are not any more what was patched."""
    return PatchStateError(
        f"After patching, something {how}, as an adapter does: what it adds to the experts would not reach the slots. "
        "Unpatch the model, merge the adapter (PeftModel.merge_and_unload()), and patch it again."
    )


def all_paths(tensors: tuple[ExpertTensor, ...]) -> Iterator[str]:
    """The parameters and buffers of all tensors, in order."""
    for tensor in tensors:
        yield from tensor.paths


def module_with(module: nn.Module, overlay: Mapping[str, Any]) -> nn.Module:
    """Return a stand-in for `module` as `self`, with the attributes in `overlay` in place of its own.

    It shares everything else with the module as it is now (submodules, flags, methods), and is for one call.
    """
    stand_in: nn.Module = object.__new__(type(module))
    # An instance attribute hides the registered parameter: nn.Module looks into its registries last.
    attributes = stand_in.__dict__
    attributes.update(module.__dict__)
    attributes.pop("forward", None)  # of its own: would be bound to the module
    attributes.update(overlay)
    return stand_in
