"""Experts that Transformers' FP8 kernels compute with: each expert's weights beside their scales, moved as they are.

Their loop (`eager`) reads one expert at a time, so it runs over slots as any other. `grouped_mm` and `batched_mm` are other
functions for them: kernels that step through the whole stack by address, which slots are not.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .stacked import StackedAdapter


class FineGrainedFp8Adapter(StackedAdapter):
    """`FP8Experts`: FP8, or FP4 packed in int8; scales in fp32 or powers of two; a scale of the input per expert, or none."""

    implementations: ClassVar[tuple[str, ...]] = ("eager",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float8_e4m3fn,
        torch.int8,
        torch.float32,
        torch.float8_e8m0fnu,
    )
    dimensions: ClassVar[tuple[int, ...]] = (1, 2, 3)
