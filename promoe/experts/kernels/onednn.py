"""Opaque tensors of oneDNN: make one from a matrix, read its bytes, or make one over existing memory."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


def reorder(linear: torch.Tensor) -> torch.Tensor:
    """Return `linear[out, in]` as an opaque tensor, in the layout that oneDNN uses to multiply one row by it."""
    return torch.ops.mkldnn._reorder_linear_weight(linear, 1)  # type: ignore[no-any-return]


def bytes_of(opaque: torch.Tensor) -> torch.Tensor:
    """Return a copy `[nbytes]` of the bytes of an opaque tensor."""
    ops: Any = torch.ops.mkldnn
    nbytes = int(ops._nbytes(opaque))
    copy = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    ctypes.memmove(copy.data_ptr(), int(ops.data_ptr(opaque)), nbytes)
    return copy


class _Library:
    """The part of torch's C interface that makes an opaque tensor over existing memory."""

    def __init__(self) -> None:
        self.complete = False
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            self._create = library.aoti_torch_create_tensor_from_blob_v2
            self._cpu = library.aoti_torch_device_type_cpu()
            self._dtypes = {torch.bfloat16: library.aoti_torch_dtype_bfloat16()}
            self._layout = library.aoti_torch_layout__mkldnn()
            self._steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
            ops: Any = torch.ops.mkldnn
            for name in (
                "_reorder_linear_weight",
                "_linear_pointwise",
                "_get_mkldnn_serialized_md",
                "data_ptr",
                "_nbytes",
            ):
                getattr(ops, name)
        except (OSError, AttributeError) as error:
            logger.debug("no opaque tensors over memory: %s", error)
            return
        self._capsule = ctypes.pythonapi.PyCapsule_New
        self._capsule.restype = ctypes.py_object
        self._capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.complete = torch.backends.mkldnn.is_available()

    def opaque(self, address: int, shape: tuple[int, int], description: bytes) -> torch.Tensor:
        """Return a tensor in oneDNN's layout over the memory at `address`, which it does not keep alive."""
        handle = ctypes.c_void_p()
        sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
        failed = self._create(
            ctypes.c_void_p(address),
            ctypes.c_int64(2),
            sizes,
            strides,
            ctypes.c_int64(0),
            ctypes.c_int32(self._dtypes[torch.bfloat16]),
            ctypes.c_int32(self._cpu),
            ctypes.c_int32(0),
            ctypes.byref(handle),
            ctypes.c_int32(self._layout),
            description,
            ctypes.c_int64(len(description)),
        )
        if failed:
            raise RuntimeError(f"torch made no opaque tensor of shape {shape} (error {failed})")
        with torch.inference_mode(False):
            return self._steal(self._capsule(handle.value, None, None))


@cache
def library() -> _Library:
    """Return the process's only `_Library`."""
    return _Library()
