"""Memory for decoding weights slice by slice, which a thread uses again for every weight."""

from __future__ import annotations

import torch

from promoe.stores.thread_memory import ThreadMemory

# Values decoded at a time: few enough to stay in the processor's cache, so many that calls of torch take less time than
# what they compute.
SLICE_ELEMENTS = 256 * 1024

_CODES, _VALUES = ThreadMemory(), ThreadMemory()


def codes_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the codes of a slice; the thread's next call overwrites it."""
    return _CODES.of(shape, dtype)


def values_of(shape: tuple[int, ...]) -> torch.Tensor:
    """Return memory for the values of a slice, float32; the thread's next call overwrites it."""
    return _VALUES.of(shape, torch.float32)
