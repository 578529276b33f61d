"""Stand-ins for expert parameters whose weights are in files. They have a shape and a dtype, and refuse to compute.

A plain meta tensor would not be safe: on the CPU, a product with one returns uninitialised memory instead of an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from promoe.errors import PromoeError


class GuardedParameter(torch.nn.Parameter):
    """A parameter without values. Its shape, dtype and flags can be read; every other operation raises PromoeError."""

    promoe_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Allow reading of shape, dtype and flags, and refuse everything else."""
        if func is torch.Tensor.detach:  # state_dict() calls it, even if the caller reads only names and shapes
            return guard_parameter(args[0].promoe_name, args[0].shape, args[0].dtype)
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise PromoeError(
            f"The experts of {_name_in([args, kwargs])!r} are in files, not in memory: {_function_name(func)} cannot "
            "use them. They are read only when the model's experts run. To use the weights themselves (save, copy, convert, "
            "train), call promoe.unpatch(model), which reads all experts into memory, or load the model with "
            "Transformers instead of promoe."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the name, shape and dtype. There are no values to show."""
        return f"GuardedParameter({self.promoe_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> GuardedParameter:
        """Refuse, because a copy would be empty as well."""
        raise PromoeError(
            f"The experts of {self.promoe_name!r} are in files, not in memory: the model cannot be copied. Open it a "
            "second time instead."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse, because a pickle would contain no weights."""
        raise PromoeError(
            f"The experts of {self.promoe_name!r} are in files, not in memory: the model cannot be pickled. Share the "
            "checkpoint instead."
        )


def guard_parameter(name: str, shape: Sequence[int], dtype: torch.dtype) -> GuardedParameter:
    """Return a stand-in on the meta device, without gradient, for the parameter `name` (its full name in the model)."""
    empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
    parameter = torch.Tensor._make_subclass(GuardedParameter, empty, False)
    assert isinstance(parameter, GuardedParameter)
    parameter.promoe_name = name
    return parameter


def is_guard(parameter: object) -> bool:
    """Return whether `parameter` is a stand-in for experts in files."""
    return isinstance(parameter, GuardedParameter)


def _name_in(value: Any) -> str | None:
    """Return the name of the first guard in nested arguments; None: there is none."""
    if isinstance(value, GuardedParameter):
        return value.promoe_name
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_name_in, value)), None)
    return None


def _function_name(func: Callable[..., Any]) -> str:
    owner = getattr(getattr(func, "__self__", None), "__name__", None)  # the property, if `func` is its getter
    name = getattr(func, "__name__", str(func))
    return f"Tensor.{owner}" if name == "__get__" and owner else name


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "_version"),
    *("requires_grad", "is_leaf", "grad", "grad_fn", "output_nr"),
    *("is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "requires_grad_", "__hash__", "__len__"),
)
_ALLOWED: set[Any] = {torch.is_floating_point, torch.numel}
_ALLOWED |= {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)}
_ALLOWED |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
# Setting `requires_grad` is allowed, because PEFT freezes all other parameters when it adds an adapter.
_ALLOWED.add(torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
