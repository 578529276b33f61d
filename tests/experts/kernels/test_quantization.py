"""Codes and scales: what the module's formulas say, exactly."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from promoe.errors import CheckpointError
from promoe.experts.kernels.quantization import METHODS, hqq, middle_code, quantize_groups, quantize_rows, rtn


def matrix(outputs: int = 6, inputs: int = 64, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((outputs, inputs), generator=generator) * spread
    return (rows * torch.rand((outputs, 1), generator=generator)).to(torch.bfloat16)


def expanded(found: tuple[torch.Tensor, ...], bits: int, group: int) -> torch.Tensor:
    """The weights that groups stand for, in fp32."""
    codes, scales, zeros = found
    by_group = (codes.float() - 2 ** (bits - 1)).unflatten(1, (-1, group))
    return (by_group * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)).flatten(1)


def test_eight_bits_by_hand() -> None:
    found = quantize_rows(torch.tensor([[127.0, -63.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert found.codes.tolist() == [[127, -63, 1, 0], [0, 0, 0, 0]]
    assert found.scales.tolist() == [1.0, 0.0]


def test_four_bits_by_hand() -> None:
    """A group from -3 to 12: the scale is 1, and the zero is the weight that code 8 stands for."""
    weights = torch.arange(-3.0, 13.0).repeat(2).unsqueeze(0)
    found = quantize_groups(weights, bits=4, group=32, method=rtn)
    assert found.codes.tolist() == [[*range(16), *range(16)]]
    assert (found.scales.item(), found.zeros.item()) == (1.0, 5.0)
    assert torch.equal(expanded(found, 4, 32), weights)


@given(st.integers(0, 10_000), st.floats(1e-6, 1e4))
@settings(max_examples=50)
def test_eight_bits_are_within_half_a_step(seed: int, spread: float) -> None:
    weights = matrix(seed=seed, spread=spread)
    codes, scales = quantize_rows(weights)
    error = (codes.float() * scales.float().unsqueeze(1) - weights.float()).abs()
    # The scale is rounded to 8 bits, so the largest code may have to stand for a weight that is a bit larger.
    assert bool((error <= scales.float().unsqueeze(1) * (0.5 + 127 / 256) + 1e-30).all())
    assert int(codes.abs().max()) <= 127


@given(st.integers(0, 10_000), st.floats(1e-6, 1e4), st.sampled_from([4, 3, 2]), st.sampled_from([32, 64]))
@settings(max_examples=50)
def test_rounding_to_nearest_is_within_half_a_step(seed: int, spread: float, bits: int, group: int) -> None:
    weights = matrix(seed=seed, spread=spread)
    found = quantize_groups(weights, bits, group, rtn)
    steps = found.scales.float().repeat_interleave(group, 1)
    slack = (found.zeros.float().abs() + 2 ** (bits - 1) * found.scales.float()).repeat_interleave(group, 1) / 128
    assert bool(((expanded(found, bits, group) - weights.float()).abs() <= steps / 2 + slack).all())
    assert int(found.codes.max()) < 2**bits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_group_of_equal_weights_is_kept(method: str, bits: int) -> None:
    weights = torch.full((2, 64), 0.75)
    weights[1] = 0.0
    assert torch.equal(expanded(quantize_groups(weights, bits, 32, METHODS[method]), bits, 32), weights)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hqq_has_a_smaller_mean_error_than_rounding(bits: int) -> None:
    weights = matrix(64, 256)
    errors = {
        name: float((expanded(quantize_groups(weights, bits, 64, method), bits, 64) - weights.float()).abs().mean())
        for name, method in METHODS.items()
    }
    assert errors["hqq"] < errors["rtn"]


def test_hqq_spares_outliers() -> None:
    """Its norm forgives one large error, so the many small weights get the codes."""
    weights = torch.randn((8, 64), generator=torch.Generator().manual_seed(1))
    weights[:, 0] = 12.0
    small = {
        name: float((expanded(quantize_groups(weights, 3, 64, method), 3, 64) - weights)[:, 1:].abs().mean())
        for name, method in METHODS.items()
    }
    assert small["hqq"] < small["rtn"]


@pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="needs the package hqq")
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hqq_is_the_packages_result(bits: int) -> None:
    from hqq.core.quantize import Quantizer

    weights = matrix(64, 256).float()
    _, meta = Quantizer.quantize(
        weights, nbits=bits, channel_wise=True, group_size=64, optimize=True, round_zero=False, axis=1, bitpack=False,
        device="cpu", compute_dtype=torch.float32,
    )  # fmt: skip
    scales, zeros = hqq(weights.unflatten(1, (-1, 64)), bits)
    assert torch.allclose(scales.flatten(), meta["scale"].flatten(), rtol=1e-5)
    offsets = middle_code(bits) - zeros / scales.to(torch.bfloat16).float()
    # They multiply by 1 / scale and we divide, so a few codes are rounded the other way.
    assert float((offsets.flatten() - meta["zero"].flatten()).abs().mean()) < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_has_no_code_is_refused(bad: float) -> None:
    weights = matrix()
    weights[2, 3] = bad
    with pytest.raises(CheckpointError, match=r"A matrix \[6, 64\] of this model has NaN or infinity"):
        quantize_rows(weights)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_groups(weights, 4, 64, rtn)
