"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes. Parsed and checked here."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from promoe.errors import CheckpointError

HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where one tensor lies: `nbytes` at `offset_bytes` of file number `file_idx`, row-major, little-endian."""

    name: str
    file_idx: int
    offset_bytes: int
    nbytes: int
    shape: tuple[int, ...]
    dtype_name: str
    """As in the file ("BF16"); may be a format that torch does not have."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, None if torch has none for the format."""
        return TORCH_DTYPES.get(self.dtype_name)


def read_header(path: Path, fd: int, size_bytes: int, file_idx: int) -> dict[str, TensorRange]:
    """The tensors of an open safetensors file of `size_bytes`, by name.

    Raises:
        CheckpointError: the header is not one, contradicts itself, or describes a file of another size.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path} is not a sound safetensors file: {what}. Download or copy the checkpoint again."
        )

    prefix = os.pread(fd, HEADER_LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < HEADER_LENGTH_BYTES or not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise damaged(f"header length {header_bytes} bytes in a file of {size_bytes} bytes")
    first_byte = HEADER_LENGTH_BYTES + header_bytes
    if first_byte > size_bytes:
        raise damaged(
            f"expected a header of {header_bytes} bytes, found {size_bytes - HEADER_LENGTH_BYTES} bytes (truncated)"
        )
    try:
        header = json.loads(os.pread(fd, header_bytes, HEADER_LENGTH_BYTES))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise damaged(f"its header is not a JSON object ({type(error).__name__}: {error})") from error
    tensors: dict[str, TensorRange] = {}
    for name, entry in entries.items():
        tensor = None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            tensor = _tensor_range(name, entry, file_idx, first_byte)
        if tensor is None:
            raise damaged(f"the header's entry for {name!r} is {str(entry)[:120]}")
        tensors[name] = tensor
    expected_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors.values()), default=first_byte)
    if size_bytes != expected_bytes:
        raise damaged(
            f"expected {expected_bytes} bytes by its header, found {size_bytes} bytes"
            + (" (truncated)" if size_bytes < expected_bytes else "")
        )
    return tensors


def _tensor_range(name: str, entry: Any, file_idx: int, first_byte: int) -> TensorRange | None:
    """None when shape, dtype and offsets contradict each other."""
    start, stop = (int(offset) for offset in entry["data_offsets"])
    shape, dtype_name = tuple(int(size) for size in entry["shape"]), str(entry["dtype"])
    dtype = TORCH_DTYPES.get(dtype_name)
    if not 0 <= start <= stop or any(size < 0 for size in shape):
        return None
    if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
        return None
    return TensorRange(name, file_idx, first_byte + start, stop - start, shape, dtype_name)
