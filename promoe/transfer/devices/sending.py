"""Small things from the host to where kernels read them, in the order of the calling thread's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# CUDA's driver copies up to 64 KiB of ordinary memory before it returns; with room to spare.
TAKEN_ALONG_BYTES = 16 * 1024


def send(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers in host memory as a tensor on `device`. Returns at once.

    So little that the driver takes it along with the order to copy it goes as it is, the rest through pinned memory, which
    torch keeps until the copy was made.
    """
    on_host = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return on_host
    if on_host.nbytes > TAKEN_ALONG_BYTES:
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
