"""The arithmetic of quantisation: which codes and scales stand for a matrix. Knows nothing of slots or files.

Matrices are `[out, in]`, as linear layers have them. Scales and zeros are rounded to bf16 before codes are chosen, so
that codes fit the scales that are stored.

* int8: `weight = code * scale`, one scale per output; codes are -127..127.
* grouped: `weight = (code - middle) * scale + zero`, one scale and one zero for each group of inputs of an output. Codes
  are 0..15 and the middle is 8 (4 bits), 0..7 and 4 (3 bits), or 0..3 and 2 (2 bits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from promoe.errors import CheckpointError
from promoe.stores.thread_memory import ThreadMemory

# HQQ's settings, as in its authors' package (hqq 0.2.8): the norm, the weight of the penalty, and the most steps.
HQQ_NORM, HQQ_BETA, HQQ_STEPS = 0.7, 10.0, 20


class Rows(NamedTuple):
    """A matrix in 8 bits."""

    codes: torch.Tensor
    """`[out, in]`, int8."""
    scales: torch.Tensor
    """`[out]`, bf16."""


# Rows are quantised so many elements at a time: memory for more would come from the system anew each time.
ELEMENTS_AT_ONCE = 256 * 1024
_WEIGHTS = ThreadMemory()
# A smaller scale has fewer bits: what has it for a scale is zero.
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny


class Groups(NamedTuple):
    """A matrix in 4, 3 or 2 bits."""

    codes: torch.Tensor
    """`[out, in]`, uint8."""
    scales: torch.Tensor
    """`[out, in / group]`, bf16."""
    zeros: torch.Tensor
    """`[out, in / group]`, bf16."""


# Takes groups `[out, in / group, group]` in fp32 and the bits; returns their scales and zeros `[out, in / group, 1]`.
Method: TypeAlias = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def middle_code(bits: int) -> int:
    """Return the code that stands for `zero`."""
    return 1 << (bits - 1)


def quantize_rows(matrix: torch.Tensor, into: Rows | None = None) -> Rows:
    """Quantise `matrix[out, in]` to 8 bits.

    Args:
        matrix: of any float dtype.
        into: what to write the codes and scales into; None: new tensors.

    Raises:
        CheckpointError: it has NaN or infinity.
    """
    outputs, inputs = matrix.shape
    rows = into or Rows(
        torch.empty((outputs, inputs), dtype=torch.int8, device="cpu"),
        torch.empty(outputs, dtype=torch.bfloat16, device="cpu"),
    )
    step = max(1, ELEMENTS_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        some = slice(start, start + step)
        weights = matrix.detach()[some]
        weights = _WEIGHTS.of((len(weights), inputs), torch.float32).copy_(weights)
        low, high = torch.aminmax(weights, dim=1)
        largest = torch.maximum(high, low.neg_())
        if not bool(torch.isfinite(largest).all()):
            raise _not_finite(matrix)
        scales = rows.scales[some].copy_(largest.div_(127))
        # No code is beyond 127: a scale in bf16 is less than 1/254 below the exact one, unless it is subnormal.
        scales.masked_fill_(scales < SMALLEST_SCALE, 0)
        rows.codes[some].copy_(weights.div_(scales.float().masked_fill_(scales == 0, torch.inf).unsqueeze(1)).round_())
    return rows


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
    scales, zeros = (found.to(torch.bfloat16) for found in method(weights, bits))
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    codes = ((weights - zeros.float()) / divisors).round_().add_(middle_code(bits)).clamp_(0, 2**bits - 1)
    return Groups(codes.to(torch.uint8).flatten(1), scales.squeeze(2), zeros.squeeze(2))


def rtn(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest: spread the codes evenly from a group's smallest weight to its largest."""
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scales = (high - low) / (2**bits - 1)
    # The stored scale is rounded. With the exact one, the zero would be off by up to `middle` times what the scale is.
    return scales, low + middle_code(bits) * scales.to(torch.bfloat16).float()


def hqq(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-quadratic quantisation: move the zeros so that the error's 0.7-norm falls, which spares outliers.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). The scales are those
    of `rtn`; the zeros are stepped until the mean absolute error stops falling.
    """
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    largest = 2**bits - 1
    scales = (high - low) / largest
    divisors = scales.masked_fill(scales == 0, 1.0)
    scaled = groups / divisors
    offsets = -low / divisors  # weight = scale * (code - offset)
    least = float("inf")
    for _ in range(HQQ_STEPS):
        codes = (scaled + offsets).round_().clamp_(0, largest)
        errors = groups - (codes - offsets) * divisors
        shrunk = errors.sign() * (errors.abs() - errors.abs().pow(HQQ_NORM - 1) / HQQ_BETA).clamp_(min=0)
        offsets = (codes - (groups - shrunk) / divisors).mean(dim=2, keepdim=True)
        if (error := float(errors.abs().mean())) >= least:
            break
        least = error
    return scales, torch.where(scales == 0, low, (middle_code(bits) - offsets) * scales.to(torch.bfloat16).float())


METHODS: dict[str, Method] = {"rtn": rtn, "hqq": hqq}


def _finite(matrix: torch.Tensor) -> torch.Tensor:
    weights = matrix.detach().to(torch.float32)
    if not all(math.isfinite(end) for end in torch.stack(torch.aminmax(weights)).tolist()):
        raise _not_finite(matrix)
    return weights


def _not_finite(matrix: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        f"A matrix {list(matrix.shape)} of this model has NaN or infinity, which has no code in fewer bits. Open the model "
        'with experts="auto" or "checkpoint", which leave it as it is.'
    )
