"""Small things from the host to where kernels read them, in the order of the calling thread's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers in host memory as a tensor on `device`. Returns at once: they go through pinned memory.

    torch keeps that memory until the copy was made.
    """
    on_host = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
