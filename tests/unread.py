"""Tensors that stand for a device's: to ask one for its values would make the host wait, and raises here."""

from __future__ import annotations

from typing import Any

import torch

# By name, as torch has each of these several times.
_READS = {
    *("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select", "bincount"),
    *("unique", "unique_consecutive", "_unique2"),
}


class Unread(torch.Tensor):
    """Whatever is computed from one is one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in _READS
        if name in ("__getitem__", "__setitem__"):  # by a mask: how many there are decides the shape
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            reads = any(isinstance(key, Unread) and key.dtype == torch.bool for key in keys)
        elif name == "repeat_interleave":
            reads = any(isinstance(repeats, Unread) for repeats in args[1:])
        elif name == "where":
            reads = len(args) == 1
        elif name == "split":
            reads = any(isinstance(size, Unread) for size in args[1:])
        assert not reads, f"{name} of a tensor on the device makes the host wait"
        return super().__torch_function__(func, types, args, kwargs or {})
