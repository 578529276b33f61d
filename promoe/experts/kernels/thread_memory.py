"""Memory in which a thread keeps one tensor at a time."""

from __future__ import annotations

import math
import threading

import torch


class ThreadMemory(threading.local):
    """One buffer for each thread that asks.

    Memory from malloc would often be new memory of the system, because oneDNN allocates in between.
    """

    _memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of this thread; the next call overwrites it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._memory):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).view(shape)
