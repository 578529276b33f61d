"""What tests of encodings share: comparing bits, and counting the memory that decoding needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from promoe.stores.encodings import gguf_bits, slices
from promoe.stores.encodings.base import Encoding
from promoe.stores.thread_memory import ThreadMemory

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that numbers have the same bits, and that NaN is at the same places."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), wanted.isnan())
    integer = {2: torch.int16, 4: torch.int32}[wanted.dtype.itemsize]
    assert torch.equal(found[numbers].view(integer), wanted[numbers].view(integer))


class _Storages(TorchDispatchMode):
    """Notes the bytes of the storages of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.nbytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return result


def largest_memory(
    encoding: Encoding, parts: list[torch.Tensor], out: torch.Tensor, slice_elements: int, patch: pytest.MonkeyPatch
) -> int:
    """Return the bytes of the largest memory that decoding in slices of this size needs besides `parts` and `out`."""
    patch.setattr(slices, "SLICE_ELEMENTS", slice_elements)
    for module, name in ((slices, "_CODES"), (slices, "_VALUES"), (gguf_bits, "_PACKED")):
        patch.setattr(module, name, ThreadMemory())
    with _Storages() as storages:
        encoding.decode(parts, out)
    for tensor in (*parts, out):
        storages.nbytes.pop(tensor.untyped_storage().data_ptr(), None)
    return max(storages.nbytes.values())
