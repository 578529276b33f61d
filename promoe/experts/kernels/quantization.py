"""The arithmetic of quantisation: which codes and scales stand for a matrix. Knows nothing of slots or files.

Matrices are `[out, in]`, as linear layers have them. Scales and zeros are rounded to bf16 before codes are chosen, so
that codes fit the scales that are stored.

* int8: `weight = code * scale`, one scale per output; codes are -127..127.
* grouped: `weight = (code - 8) * scale + zero`, one scale and one zero for each group of inputs of an output; codes are
  0..15 (4 bits), 0..7 (3 bits) or 0..3 (2 bits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from promoe.errors import CheckpointError

# The code that stands for `zero`, whatever the number of bits: that of torch's int4 kernel.
MIDDLE = 8
# HQQ's settings, as its authors published them: the norm, the weight of the penalty and its growth, and the steps.
HQQ_NORM, HQQ_BETA, HQQ_GROWTH, HQQ_STEPS = 0.7, 10.0, 1.01, 20


class Rows(NamedTuple):
    """A matrix in 8 bits."""

    codes: torch.Tensor
    """`[out, in]`, int8."""
    scales: torch.Tensor
    """`[out]`, bf16."""


class Groups(NamedTuple):
    """A matrix in 4, 3 or 2 bits."""

    codes: torch.Tensor
    """`[out, in]`, uint8."""
    scales: torch.Tensor
    """`[out, in / group]`, bf16."""
    zeros: torch.Tensor
    """`[out, in / group]`, bf16."""


# Takes groups `[out, in / group, group]` in fp32 and the largest code; returns their scales and zeros `[out, in / group, 1]`.
Method: TypeAlias = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def quantize_rows(matrix: torch.Tensor) -> Rows:
    """Quantise `matrix[out, in]` to 8 bits.

    Raises:
        CheckpointError: it has NaN or infinity.
    """
    weights = _finite(matrix)
    scales = (weights.abs().amax(dim=1) / 127).to(torch.bfloat16)
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    codes = (weights / divisors.unsqueeze(1)).round_().clamp_(-127, 127)
    return Rows(codes.to(torch.int8), scales)


def quantize_groups(matrix: torch.Tensor, bits: int, group: int, method: Method) -> Groups:
    """Quantise `matrix[out, in]` to 4, 3 or 2 bits.

    Args:
        matrix: of any float dtype.
        bits: of a code.
        group: inputs that share a scale; divides `in`.
        method: chooses scales and zeros.

    Raises:
        CheckpointError: it has NaN or infinity.
    """
    weights = _finite(matrix).unflatten(1, (-1, group))
    largest = 2**bits - 1
    scales, zeros = (found.to(torch.bfloat16) for found in method(weights, largest))
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    codes = ((weights - zeros.float()) / divisors).round_().add_(MIDDLE).clamp_(0, largest)
    return Groups(codes.to(torch.uint8).flatten(1), scales.squeeze(2), zeros.squeeze(2))


def rtn(groups: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest: spread the codes evenly from a group's smallest weight to its largest."""
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scales = (high - low) / largest
    # The stored scale is rounded. With the exact one, the zero would be off by up to 8 times what the scale is.
    return scales, low + MIDDLE * scales.to(torch.bfloat16).float()


def hqq(groups: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-quadratic quantisation: move the zeros so that the error's 0.7-norm falls, which spares outliers.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). The scales are those
    of `rtn`; the zeros are stepped until the mean absolute error stops falling.
    """
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scales = (high - low) / largest
    divisors = scales.masked_fill(scales == 0, 1.0)
    scaled = groups / divisors
    offsets = -low / divisors  # weight = scale * (code - offset)
    best, least, beta = offsets, float("inf"), HQQ_BETA
    for _ in range(HQQ_STEPS):
        codes = (scaled + offsets).round_().clamp_(0, largest)
        errors = groups - (codes - offsets) * divisors
        error = float(errors.abs().mean())
        if error >= least:
            break
        best, least = offsets, error
        shrunk = errors.sign() * (errors.abs() - errors.abs().pow(HQQ_NORM - 1) / beta).clamp_(min=0)
        offsets = (codes - (groups - shrunk) / divisors).mean(dim=2, keepdim=True)
        beta *= HQQ_GROWTH
    return scales, torch.where(scales == 0, low, (MIDDLE - best) * scales.to(torch.bfloat16).float())


METHODS: dict[str, Method] = {"rtn": rtn, "hqq": hqq}


def _finite(matrix: torch.Tensor) -> torch.Tensor:
    weights = matrix.detach().to(torch.float32)
    if not all(math.isfinite(end) for end in torch.stack(torch.aminmax(weights)).tolist()):
        raise CheckpointError(
            f"A matrix {list(matrix.shape)} of an expert has NaN or infinity, which has no code in fewer bits. Run this "
            "model with its experts as they are."
        )
    return weights
