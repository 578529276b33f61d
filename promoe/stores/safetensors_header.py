"""Reads and checks the header of a safetensors file: 8 bytes of length, then JSON, then the tensors' bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.files import LFS_BEGINS, MAX_JSON_BYTES, is_lfs_pointer, loads

HEADER_LENGTH_BYTES = 8
# More than torch allows. The product of a list of millions would take for ever.
MAX_DIMENSIONS = 64
# Offsets and sizes must be smaller, or neither the system nor torch can represent them.
END = 2**63

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
    """The place of one tensor: `nbytes` at `offset_bytes` of file number `file_idx`, row-major, little-endian."""

    name: str
    file_idx: int
    offset_bytes: int
    nbytes: int
    shape: tuple[int, ...]
    dtype_name: str
    """The dtype's name in the file, for example "BF16"; may be a format that torch does not have."""
    file_name: str = field(default="", compare=False, repr=False)
    """The file's name, for messages."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype; None if torch does not have the format."""
        return TORCH_DTYPES.get(self.dtype_name)

    def rows(self, start: int, stop: int) -> TensorRange:
        """Return the part from one index along the first dimension up to another, which may be too large."""
        row_bytes = self.nbytes // max(1, self.shape[0])
        count = min(stop, self.shape[0]) - start
        offset_bytes = self.offset_bytes + start * row_bytes
        return replace(self, offset_bytes=offset_bytes, nbytes=count * row_bytes, shape=(count, *self.shape[1:]))


def read_header(path: Path, fd: int, size_bytes: int, file_idx: int) -> dict[str, TensorRange]:
    """Return the tensors of an open safetensors file of `size_bytes`, by name.

    Raises:
        CheckpointError: the header is invalid, contradicts itself, or describes a file of another size.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path} is not a sound safetensors file: {what}. Download or copy the checkpoint again."
        )

    if is_lfs_pointer(os.pread(fd, len(LFS_BEGINS), 0)):
        raise CheckpointError(
            f"{path} is a Git LFS pointer of {size_bytes} bytes, not the weights. Run `git lfs pull` in its folder."
        )
    prefix = os.pread(fd, HEADER_LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < HEADER_LENGTH_BYTES or not 2 <= header_bytes <= MAX_JSON_BYTES:
        raise damaged(f"header length {header_bytes} bytes in a file of {size_bytes} bytes")
    first_byte = HEADER_LENGTH_BYTES + header_bytes
    if first_byte > size_bytes:
        raise damaged(
            f"expected a header of {header_bytes} bytes, found {size_bytes - HEADER_LENGTH_BYTES} bytes (truncated)"
        )
    try:
        header = loads(os.pread(fd, header_bytes, HEADER_LENGTH_BYTES), constants=False)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise damaged(f"its header is not a JSON object ({type(error).__name__}: {error})") from error
    tensors: dict[str, TensorRange] = {}
    for name, entry in entries.items():
        tensor = _tensor_range(name, entry, file_idx, first_byte, path.name)
        if tensor is None:
            raise damaged(f"the header's entry for {name[:200]!r} is {str(entry)[:120]}")
        tensors[name] = tensor
    expected_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors.values()), default=first_byte)
    if size_bytes != expected_bytes:
        raise damaged(
            f"expected {expected_bytes} bytes by its header, found {size_bytes} bytes"
            + (" (truncated)" if size_bytes < expected_bytes else "")
        )
    if (fault := _layout_fault(tensors.values(), first_byte)) is not None:
        raise damaged(fault)
    return tensors


def _layout_fault(tensors: Iterable[TensorRange], first_byte: int) -> str | None:
    """Return what is wrong if the tensors do not follow one another without gaps, as the format requires."""
    end, before = first_byte, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset_bytes, tensor.nbytes)):
        if tensor.offset_bytes != end:
            what = "overlaps" if tensor.offset_bytes < end else "does not follow"
            return f"{tensor.name[:200]!r} begins at byte {tensor.offset_bytes} and {what} {before}, which ends at byte {end}"
        end, before = tensor.offset_bytes + tensor.nbytes, repr(tensor.name[:200])
    return None


def _tensor_range(name: str, entry: Any, file_idx: int, first_byte: int, file_name: str) -> TensorRange | None:
    """Return the tensor of a header entry; None if the entry is invalid or contradicts itself."""
    if not isinstance(entry, dict):
        return None
    offsets, shape, dtype_name = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not (isinstance(offsets, list) and isinstance(shape, list) and isinstance(dtype_name, str)):
        return None
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        return None
    # Nothing that int() would have to convert: in a sound header, a number is written as a number.
    if not all(type(number) is int and 0 <= number < END for number in (*offsets, *shape)):
        return None
    start, stop = offsets
    dtype = TORCH_DTYPES.get(dtype_name)
    itemsize = 1 if dtype is None else dtype.itemsize
    # Zeros are left out: torch also computes the strides of a tensor without elements.
    if stop < start or math.prod(size for size in shape if size) * itemsize >= END:
        return None
    if dtype is not None and stop - start != math.prod(shape) * itemsize:
        return None
    return TensorRange(name, file_idx, first_byte + start, stop - start, tuple(shape), dtype_name, file_name)
