"""FP8 weights are their values times their blocks' scales, in fp32, rounded once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings import slices
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.fp8 import Fp8, find_fp8
from stores.encodings.ranges import ranges
from tests.stores.encodings.comparing import DTYPES, assert_same_bits, largest_memory

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = (torch.int8, torch.uint8)
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAN_CODES = (0x7F, 0xFF)
SCALE_NAME = "weight_scale_inv"
# Scales around which shortcuts could go wrong: the product is subnormal, or infinite, or the scale itself is.
EXTREMES = (0.0, -0.0, -0.3, 1e-42, 1e-38, -3e-36, 2.0**111, 2.0**112, 2.0**119, 2.0**127, 3e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))


def formula(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, computed as plainly as possible."""
    if codes.dtype in FP4:
        numbers = codes.view(torch.uint8).long()
        values = torch.stack((LEVELS[numbers % 16], LEVELS[numbers // 16]), -1).flatten(-2)
    else:
        values = codes.float()
    scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    grid = scales if scales.dim() >= 2 else scales.reshape(1, 1)
    for dim in (0, 1):
        grid = grid.repeat_interleave(values.shape[dim] // grid.shape[dim], dim)
    return (values * grid).to(dtype)


def decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    columns = codes.shape[1] * (2 if codes.dtype in FP4 else 1)
    out = torch.full((codes.shape[0], columns), 7.0, dtype=dtype)
    Fp8().decode([codes, scales], out)
    return out


def every_code(dtype: torch.dtype, rows: int, columns: int, without: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a matrix of codes, all of which occur if it is large enough."""
    codes = torch.tensor([code for code in range(256) if code not in without], dtype=torch.uint8)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1))
    return codes[order % len(codes)].view(rows, columns).view(dtype)


def random_scales(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.01


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("without", [(), NAN_CODES], ids=["all", "finite"])
@pytest.mark.parametrize("dtype", [*FP8, *FP4], ids=str)
def test_every_code_becomes_its_value_times_the_scale(
    dtype: torch.dtype, without: tuple[int, ...], out_dtype: torch.dtype
) -> None:
    codes, scales = every_code(dtype, 32, 48, without), random_scales((4, 3))
    assert_same_bits(decoded(codes, scales, out_dtype), formula(codes, scales, out_dtype))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [*EXTREMES, *NOT_FINITE])
@pytest.mark.parametrize("dtype", [*FP8, *FP4], ids=str)
def test_every_code_with_extreme_scales(dtype: torch.dtype, scale: float, out_dtype: torch.dtype) -> None:
    codes, scales = every_code(dtype, 16, 32, NAN_CODES), torch.full((2, 2), scale)
    assert_same_bits(decoded(codes, scales, out_dtype), formula(codes, scales, out_dtype))


def test_one_nan_among_all_codes_is_found() -> None:
    for code in NAN_CODES:
        codes = every_code(torch.float8_e4m3fn, 8, 16, NAN_CODES)
        codes.view(torch.uint8)[5, 11] = code
        found = decoded(codes, random_scales((1, 1)), torch.bfloat16)
        assert found.isnan().nonzero().tolist() == [[5, 11]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_every_dtype(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        scales = torch.arange(256, dtype=torch.uint8).view(dtype).view(32, 8)
    else:
        scales = random_scales((32, 8)).to(dtype)
    codes = every_code(torch.float8_e4m3fn, 64, 32, NAN_CODES)
    assert_same_bits(decoded(codes, scales, torch.float32), formula(codes, scales, torch.float32))


@pytest.mark.parametrize("slice_elements", [1, 42 * 5, 42 * 21, 10**6])
@pytest.mark.parametrize("scales", [(1, 1), (3, 7), (21, 1), (63, 42), (1, 42), (63, 14), (9, 2), (1,), ()], ids=str)
def test_blocks_of_every_size(scales: tuple[int, ...], slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever slices of rows end."""
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", slice_elements)
    codes, of_blocks = every_code(torch.float8_e4m3fn, 63, 42, NAN_CODES), random_scales(scales)
    assert_same_bits(decoded(codes, of_blocks, torch.bfloat16), formula(codes, of_blocks, torch.bfloat16))


def test_dtypes_without_a_shortcut_are_decoded_too() -> None:
    codes, scales = every_code(torch.float8_e4m3fnuz, 16, 16), random_scales((2, 2))
    assert_same_bits(decoded(codes, scales, torch.bfloat16), formula(codes, scales, torch.bfloat16))


@pytest.mark.parametrize("without", [(), NAN_CODES], ids=["all", "finite"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=str)
def test_memory_does_not_grow_with_the_weight(
    dtype: torch.dtype, without: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = every_code(dtype, 512, 128, without)
    out = torch.empty((512, 128 * (2 if dtype in FP4 else 1)), dtype=torch.bfloat16)
    assert largest_memory(Fp8(), [codes, random_scales((4, 1))], out, 2048, monkeypatch) == 2048 * 4


class TestBlocksThatAreCutOff:
    """The last ones, where the weight's sizes are no multiples of theirs, which only config.json says."""

    CONFIG = MappingProxyType({"weight_block_size": [128, 128]})

    def the_weight(
        self, shape: tuple[int, int], counts: tuple[int, ...], config: Mapping[str, Any] = CONFIG
    ) -> EncodedTensor:
        parts = {"weight": torch.zeros(shape).to(FP8[0]), "weight_scale_inv": torch.zeros(counts)}
        weight = find_fp8(ranges(parts), config)["layer.weight"]
        assert isinstance(weight, EncodedTensor)
        return weight

    @pytest.mark.parametrize("shape", [(576, 256), (256, 200), (200, 300), (130, 64), (64, 130), (192, 128)])
    @pytest.mark.parametrize("slice_elements", [1, 60_000, slices.SLICE_ELEMENTS])
    def test_each_weight_has_the_scale_of_its_block(
        self, shape: tuple[int, int], slice_elements: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_ELEMENTS", slice_elements)
        counts = (-(-shape[0] // 128), -(-shape[1] // 128))
        weight = self.the_weight(shape, counts)
        assert weight.encoding == Fp8((128, 128))
        codes, scales = every_code(FP8[0], *shape, NAN_CODES), random_scales(counts)
        out = torch.full(shape, 7.0, dtype=torch.bfloat16)
        weight.encoding.decode([codes, scales], out)
        grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
        assert torch.equal(out, (codes.float() * grid).bfloat16())

    @pytest.mark.parametrize(("shape", "counts"), [((256, 128), (2, 1)), ((64, 32), (1, 1)), ((256, 384), (2, 3))])
    def test_others_are_alike(self, shape: tuple[int, int], counts: tuple[int, ...]) -> None:
        assert self.the_weight(shape, counts).encoding == Fp8()

    @pytest.mark.parametrize("size", [None, 128, [128], [128, 0], [128.0, 128], ["128", "128"], [[128, 128]]])
    def test_sizes_that_are_none(self, size: Any) -> None:
        with pytest.raises(
            CheckpointError, match=r"\[576, 256\], which is not divisible into the blocks of its \[5, 2\]"
        ):
            self.the_weight((576, 256), (5, 2), {"weight_block_size": size})


class TestScalesThatDoNotFit:
    """Their number and dtype are those of the format, or the weight is refused: with other ones it would be wrong."""

    def found(
        self, shape: tuple[int, ...], scales: torch.Tensor, dtype: torch.dtype = FP8[0], size: Any = None, **names: str
    ) -> Any:
        parts = {names.get("weight", "weight"): torch.zeros(shape).to(dtype), names.get("scale", SCALE_NAME): scales}
        return find_fp8(ranges(parts), {"weight_block_size": size})

    @pytest.mark.parametrize(
        ("shape", "counts", "size"),
        [
            *(
                ((256, 256), counts, [128, 128])
                for counts in ((), (1,), (2,), (1, 1), (2, 1), (4, 4), (256, 8), (2, 2, 1))
            ),
            ((512, 256), (2, 4), [128, 128]),  # transposed
            ((512, 256), (2, 4), None),
            ((256, 256), (1, 256), None),
            ((256, 256), (256,), None),
            ((256, 256), (0, 2), None),
            ((4, 256, 256), (4, 2, 1), [128, 128]),
            *(((4, 256, 256), counts, [128, 128]) for counts in ((3, 2, 2), (2, 2), (8, 2), (2, 2, 4))),
            *(((4, 256, 256), counts, None) for counts in ((), (1,), (3,), (2, 2), (1, 1), (3, 1, 1))),
            ((256,), (2,), None),
            ((2, 2, 64, 64), (2, 2, 1, 1), None),
        ],
    )
    def test_shape(self, shape: tuple[int, ...], counts: tuple[int, ...], size: Any) -> None:
        named = (
            rf"'layer.weight' \(F8_E4M3.*has shape {re.escape(str(list(shape)))}.*{re.escape(str(list(counts)))} scales"
        )
        with pytest.raises(CheckpointError, match=named):
            self.found(shape, torch.ones(counts), size=size)

    @pytest.mark.parametrize("scale", [torch.int32, torch.int64, torch.int8, torch.bool, torch.float64, *FP8], ids=str)
    def test_dtype(self, scale: torch.dtype) -> None:
        with pytest.raises(CheckpointError, match=r"one of their dtypes is not expected.*scales in F32"):
            self.found((64, 64), torch.ones((2, 2)).to(scale))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
    def test_weight_that_is_not_fp8(self, dtype: torch.dtype) -> None:
        """It may have been decoded before, and the scales left where they were."""
        with pytest.raises(CheckpointError, match=r"one of their dtypes is not expected: F8_E4M3"):
            self.found((64, 64), torch.ones((2, 2)), dtype)

    @pytest.mark.parametrize(
        ("shape", "counts", "size", "block"),
        [
            ((4, 256, 256), (4, 2, 2), [128, 128], None),
            ((4, 200, 256), (4, 2, 2), [128, 128], (128, 128)),
            ((4, 256, 256), (4,), None, None),
            ((4, 256, 256), (4, 1), None, None),
            ((4, 256, 256), (4, 1, 1), None, None),
            ((256, 256), (256, 1), None, None),
            ((256, 256), (256, 8), None, None),
            ((256, 128), (4, 2), None, None),
        ],
    )
    def test_shapes_that_fit(
        self, shape: tuple[int, ...], counts: tuple[int, ...], size: Any, block: tuple[int, int] | None
    ) -> None:
        (weight,) = self.found(shape, torch.ones(counts), size=size).values()
        assert weight.encoding == Fp8(block)

    @pytest.mark.parametrize("name", ["scale", "qscale_weight"])
    def test_other_names_that_transformers_reads(self, name: str) -> None:
        (weight,) = self.found((64, 64), torch.ones((2, 2)), scale=name).values()
        assert [part.name for part in weight.parts] == ["layer.weight", f"layer.{name}"]
        norm = ranges({"weight": torch.zeros(64), "scale": torch.zeros(64)})
        assert find_fp8(norm, {}) == norm

    def test_two_sets_of_scales(self) -> None:
        parts = {
            "weight": torch.zeros((64, 64)).to(FP8[0]),
            SCALE_NAME: torch.ones((2, 2)),
            "scale": torch.ones((2, 2)),
        }
        with pytest.raises(CheckpointError, match=r"has scales twice: layer.weight_scale_inv .*layer.scale"):
            find_fp8(ranges(parts), {})
