"""MXFP4 weights are the transpose of FP4 values times powers of two, in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch

from promoe.stores.encodings import mxfp4, slices
from promoe.stores.encodings.mxfp4 import Mxfp4
from tests.stores.encodings import comparing
from tests.stores.encodings.comparing import DTYPES, assert_same_bits, largest_memory

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def formula(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, computed as plainly as possible."""
    numbers = blocks.long()
    values = torch.stack((LEVELS[numbers % 16], LEVELS[numbers // 16]), -1).flatten(-2)
    powers = torch.tensor([2.0**number if number < 128 else float("inf") for number in range(-127, 129)])
    return (values * powers[exponents.long()].unsqueeze(-1)).flatten(-2).t().to(dtype)


def random_parts(outputs: int, groups: int, first: int = 117, last: int = 137) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs * groups)
    blocks = torch.randint(0, 256, (outputs, groups, 16), dtype=torch.uint8, generator=generator)
    return [blocks, torch.randint(first, last, (outputs, groups), dtype=torch.uint8, generator=generator)]


def decoded(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    outputs, groups = parts[1].shape
    out = torch.full((32 * groups, outputs), 7.0, dtype=dtype)
    Mxfp4().decode(parts, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (64, 90), (300, 5)], ids=str)
def test_values_are_scaled_and_transposed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = random_parts(*shape)
    assert_same_bits(decoded(parts, dtype), formula(parts[0], parts[1], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_with_every_exponent(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    exponents = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    assert_same_bits(decoded([blocks, exponents], dtype), formula(blocks, exponents, dtype))


@pytest.mark.parametrize("outputs", [1, 8, 13, 1000])
@pytest.mark.parametrize("slice_elements", [1, 1000, 10**6])
def test_tiles_of_every_size(outputs: int, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", slice_elements)
    monkeypatch.setattr(mxfp4, "OUTPUTS", outputs)
    parts = random_parts(37, 11)
    assert_same_bits(decoded(parts, torch.bfloat16), formula(parts[0], parts[1], torch.bfloat16))


def test_memory_does_not_grow_with_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "OUTPUTS", 16)
    out = torch.empty((64 * 32, 100), dtype=torch.bfloat16)
    assert largest_memory(Mxfp4(), random_parts(100, 64), out, 2048, monkeypatch) == 2048 * 4


def test_what_differs_is_noticed() -> None:
    """The comparison that these tests rest on sees a sign of zero."""
    with pytest.raises(AssertionError):
        comparing.assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
