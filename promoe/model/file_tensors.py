"""Weights other than experts, read from the checkpoint's files when Transformers asks for them, with progress reports."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.safetensors_header import TensorRange
from promoe.stores.tensor_files import TensorFiles

Progress = Callable[[int, int], None]


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


class TensorInFile:
    """A tensor in a file, with the interface of a safetensors slice: `tensor[...]` reads it into new memory."""

    def __init__(
        self, files: TensorFiles, where: TensorRange, count: Callable[[int], None], most_elements: int
    ) -> None:
        self._files, self._where, self._count, self._most_elements = files, where, count, most_elements

    def get_shape(self) -> list[int]:
        """Return the tensor's shape in the file."""
        return list(self._where.shape)

    def get_dtype(self) -> str:
        """Return the name of the tensor's dtype in the file, such as "BF16"."""
        return self._where.dtype_name

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._where.dtype is None:
            raise CheckpointError(
                f"The checkpoint's {self._where.name!r} has dtype {self._where.dtype_name}, which torch does not have."
            )
        # Transformers compares shapes only after it has read the tensor, for which there may be too little memory.
        if math.prod(self._where.shape) > self._most_elements:
            raise CheckpointError(
                f"The checkpoint's {self._where.name!r} has shape {list(self._where.shape)}: more elements than the whole "
                f"model, which has {self._most_elements}. The checkpoint is not of this model, or config.json was changed."
            )
        tensor = torch.empty(self._where.shape, dtype=self._where.dtype)  # torch aligns it to 64 bytes
        if self._where.nbytes:
            self._files.read_into(self._where, tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._count(self._where.nbytes)
        return tensor[index]
