"""Weights other than experts, read from the checkpoint's files when Transformers asks for them, with progress reports."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, StoredTensor
from promoe.stores.safetensors_header import TORCH_DTYPES, TensorRange
from promoe.stores.tensor_files import TensorFiles

Progress = Callable[[int, int], None]

# What is read at a time of a weight that can be decoded some rows at a time. It is in memory beside the weight.
READ_BYTES = 4 << 20


class Counted:
    """Counts the bytes that were read, and reports them to a function of the caller.

    Several threads may count at once. The function is never called by two of them at the same time.
    """

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._done_bytes = 0
        self.total_bytes = 0
        self.raised: list[Exception] = []
        """Errors that the caller's function has raised, in any thread."""

    def count(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes that were read, and report the sum."""
        with self._lock:
            self._done_bytes += nbytes
            try:
                self._report(self._done_bytes, max(self.total_bytes, self._done_bytes))
            except Exception as error:
                self.raised.append(error)
                raise

    def end(self) -> None:
        """Report that everything was read, also if the model needed fewer bytes than expected."""
        if self._done_bytes < self.total_bytes:
            self.count(self.total_bytes - self._done_bytes)


class Reader:
    """Reads tensors from files into new memory, and counts their bytes.

    Args:
        files: of the checkpoint.
        count: called with the bytes of each tensor that was read.
        most_elements: a tensor that has more is not read.
    """

    def __init__(self, files: TensorFiles, count: Callable[[int], None], most_elements: int) -> None:
        self._files, self._count, self._most_elements = files, count, most_elements

    def check(self, tensor: StoredTensor) -> None:
        """Raise CheckpointError if a tensor has too many elements.

        Transformers compares shapes only after it has read the tensor, for which there may be too little memory.
        """
        if math.prod(tensor.shape) > self._most_elements:
            raise CheckpointError(
                f"The checkpoint's {tensor.name!r} has shape {list(tensor.shape)}: more elements than the whole "
                f"model, which has {self._most_elements}. The checkpoint is not of this model, or config.json was changed."
            )

    def read(self, where: TensorRange) -> torch.Tensor:
        """Return a tensor of the files as it is there."""
        if where.dtype is None:
            raise CheckpointError(
                f"The checkpoint's {where.name!r} has dtype {where.dtype_name}, which torch does not have."
            )
        tensor = torch.empty(where.shape, dtype=where.dtype)  # torch aligns it to 64 bytes
        if where.nbytes:
            self._files.read_into(where, tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._count(where.nbytes)
        return tensor


class TensorInFile:
    """A tensor in a file, with the interface of a safetensors slice: `tensor[...]` reads it into new memory."""

    def __init__(self, where: TensorRange, reader: Reader) -> None:
        self._where, self._reader = where, reader

    def get_shape(self) -> list[int]:
        """Return the tensor's shape in the file."""
        return list(self._where.shape)

    def get_dtype(self) -> str:
        """Return the name of the tensor's dtype in the file, such as "BF16"."""
        return self._where.dtype_name

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._reader.check(self._where)
        return self._reader.read(self._where)[index]


class EncodedInFile:
    """A weight in fewer bits in files, with the interface of a safetensors slice: `tensor[...]` decodes it to `dtype`."""

    def __init__(self, where: EncodedTensor, dtype: torch.dtype, reader: Reader) -> None:
        self._where, self._dtype, self._reader = where, dtype, reader

    def get_shape(self) -> list[int]:
        """Return the weight's shape."""
        return list(self._where.shape)

    def get_dtype(self) -> str:
        """Return the name that safetensors has for the dtype it is decoded to."""
        return next(name for name, dtype in TORCH_DTYPES.items() if dtype == self._dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._reader.check(self._where)
        weight, encoding = torch.empty(self._where.shape, dtype=self._dtype), self._where.encoding
        if weight.dim() > 2:  # a stack
            for idx, one in enumerate(weight):
                encoding.decode([part[0] for part in self._read(idx, idx + 1)], one)
        elif weight.dim() == 2 and encoding.by_rows:
            step = max(1, READ_BYTES * len(weight) // max(1, self._where.nbytes))
            for start in range(0, len(weight), step):
                encoding.decode(self._read(start, start + step), weight[start : start + step])
        else:
            encoding.decode([self._reader.read(part) for part in self._where.parts], weight)
        return weight[index]

    def _read(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the parts from a row on (of a stack: from a matrix on), and up to another."""
        return [self._reader.read(part.rows(start, stop)) for part in self._where.parts]
