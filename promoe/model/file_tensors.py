"""The weights besides experts, read from the checkpoint's files as Transformers asks for them, and counted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_header import TensorRange

Progress = Callable[[int, int], None]


class Counted:
    """Bytes that were read of those that will be; told to a caller, from several threads, one at a time."""

    def __init__(self, told: Progress) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._done_bytes = 0
        self.total_bytes = 0
        self.raised: list[Exception] = []
        """By the caller's function, in several threads."""

    def count(self, nbytes: int) -> None:
        """So many bytes were read."""
        with self._lock:
            self._done_bytes += nbytes
            try:
                self._told(self._done_bytes, max(self.total_bytes, self._done_bytes))
            except Exception as error:
                self.raised.append(error)
                raise

    def end(self) -> None:
        """All that the model needs was read, also where that is less than was expected."""
        if self._done_bytes < self.total_bytes:
            self.count(self.total_bytes - self._done_bytes)


class TensorInFile:
    """What Transformers takes for a slice of a safetensors file: `tensor[...]` reads it, into new aligned memory."""

    def __init__(
        self, files: SafetensorsFiles, where: TensorRange, count: Callable[[int], None], most_elements: int
    ) -> None:
        self._files, self._where, self._count, self._most_elements = files, where, count, most_elements

    def get_shape(self) -> list[int]:
        """Return its shape in the file."""
        return list(self._where.shape)

    def get_dtype(self) -> str:
        """Return its dtype in the file's own words ("BF16")."""
        return self._where.dtype_name

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._where.dtype is None:
            raise CheckpointError(
                f"The checkpoint's {self._where.name!r} has dtype {self._where.dtype_name}, which torch does not have."
            )
        if math.prod(self._where.shape) > self._most_elements:  # Transformers compares shapes when it has read them
            raise CheckpointError(
                f"The checkpoint's {self._where.name!r} has shape {list(self._where.shape)}: more elements than the whole "
                f"model, which has {self._most_elements}. The checkpoint is not of this model, or config.json was changed."
            )
        tensor = torch.empty(self._where.shape, dtype=self._where.dtype)  # torch allocates at 64 bytes
        if self._where.nbytes:
            self._files.read_into(self._where, tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._count(self._where.nbytes)
        return tensor[index]
