"""Memory in which a thread keeps one tensor at a time."""

from __future__ import annotations

import math
import threading

import torch

CPU = torch.device("cpu")


class ThreadMemory(threading.local):
    """One buffer in RAM for each thread that asks.

    Memory from malloc would often be new memory of the system, because oneDNN allocates in between. On a device there is
    no such buffer: torch's allocator keeps memory there, and lets nothing overwrite it before kernels have read it.
    """

    _memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """Return an empty tensor on `device`; in RAM, it is this thread's, and the next call overwrites it."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._memory):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).view(shape)
