"""Experts in FP8 with Transformers' own FP8 kernels. Weights and their scales are moved as they are.

The loop (`eager`) reads one expert at a time, so it runs over slots like any other. For these experts, `grouped_mm` and
`batched_mm` are kernels that compute addresses in one stack of all experts, which slots are not.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .stacked import StackedAdapter


class FineGrainedFp8Adapter(StackedAdapter):
    """The adapter of `FP8Experts`.

    Weights are FP8, or FP4 packed in int8. Scales are fp32 or powers of two. An expert may have a scale for its input.
    """

    implementations: ClassVar[tuple[str, ...]] = ("eager",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float8_e4m3fn,
        torch.int8,
        torch.float32,
        torch.float8_e8m0fnu,
    )
    dimensions: ClassVar[tuple[int, ...]] = (1, 2, 3)
