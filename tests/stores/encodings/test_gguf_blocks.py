"""GGUF blocks become what the `gguf` package's `dequantize` makes of them, bit for bit, rounded once."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings import gguf_books, slices
from promoe.stores.encodings.gguf_blocks import GgufBlocks, block_encoding
from tests.stores.encodings.comparing import DTYPES, assert_same_bits, largest_memory

# Of the first two there are no weights in files. A weight in NVFP4 has a second scale elsewhere. `gguf` cannot decode Q1_0.
OTHERS = ("Q8_1", "Q8_K", "NVFP4", "Q1_0")


def can_be_decoded(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        return block_encoding(kind.value) is not None
    except CheckpointError:  # old versions of Transformers have no code books
        return False


TYPES = [kind for kind in gguf.GGMLQuantizationType if can_be_decoded(kind)]
# Bytes of each block at which fp16 scales begin; IQ1_M keeps its scale in the high bits of four numbers.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"), (0,)),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "IQ1_M": (),
}
EXTREMES = (0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-15, 65504.0, -65504.0, float("inf"), float("-inf"), float("nan"))


def encoding(kind: gguf.GGMLQuantizationType) -> GgufBlocks:
    found = block_encoding(kind.value)
    assert found is not None
    return found


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int], scales: np.ndarray) -> np.ndarray:
    """Return rows of blocks of random bytes, with scales that are drawn from `scales`."""
    rng = np.random.default_rng(kind.value)
    block_bytes = encoding(kind).block_bytes
    blocks = rng.integers(0, 256, (*shape, block_bytes), dtype=np.uint8)
    for offset in HALVES[kind.name]:
        drawn = rng.choice(scales.astype(np.float16), shape)
        blocks[..., offset : offset + 2] = drawn[..., None].view(np.uint8)
    if kind.name == "IQ1_M":
        drawn = rng.choice(scales.astype(np.float16), shape).view(np.uint16)
        for idx in range(4):
            high = blocks[..., 49 + 2 * idx]
            high[...] = high & 15 | (drawn >> 4 * idx & 15).astype(np.uint8) << 4
    return blocks.reshape(shape[0], -1)


def expected(kind: gguf.GGMLQuantizationType, rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(rows, kind)).to(dtype)


def decoded(kind: gguf.GGMLQuantizationType, rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    blocks = encoding(kind)
    columns = rows.shape[1] // blocks.block_bytes * blocks.block_elements
    out = torch.full((len(rows), columns), 7.0, dtype=dtype)
    blocks.decode([torch.from_numpy(rows)], out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_blocks_are_decoded_as_the_gguf_package_does(kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> None:
    rows = random_blocks(kind, (5, 3), np.linspace(-0.1, 0.1, 999))
    assert_same_bits(decoded(kind, rows, dtype), expected(kind, rows, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_extreme_scales_come_out_as_the_formula_says(kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> None:
    rows = random_blocks(kind, (16, 8), np.array(EXTREMES))
    assert_same_bits(decoded(kind, rows, dtype), expected(kind, rows, dtype))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (11, 1)], ids=str)
def test_sizes_that_are_no_whole_number_of_slices(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", 4 * encoding(kind).block_elements)
    rows = random_blocks(kind, shape, np.linspace(0.01, 0.1, 99))
    assert_same_bits(decoded(kind, rows, torch.bfloat16), expected(kind, rows, torch.bfloat16))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_memory_does_not_grow_with_the_weight(kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(random_blocks(kind, (64, 4), np.linspace(0.01, 0.1, 99)))
    out = torch.empty((64, 4 * encoding(kind).block_elements), dtype=torch.bfloat16)
    assert largest_memory(encoding(kind), [rows], out, 1024, monkeypatch) == 1024 * 4


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_blocks_may_lie_anywhere_in_memory(kind: gguf.GGMLQuantizationType) -> None:
    rows = random_blocks(kind, (1, 3), np.linspace(0.01, 0.1, 99))
    shifted = torch.empty(rows.size + 1, dtype=torch.uint8)[1:].copy_(torch.from_numpy(rows[0]))
    out = torch.empty(3 * encoding(kind).block_elements)
    encoding(kind).decode([shifted], out)
    assert_same_bits(out, expected(kind, rows, torch.float32)[0])


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_the_default_dtype_does_not_matter(kind: gguf.GGMLQuantizationType) -> None:
    rows = random_blocks(kind, (2, 3), np.linspace(0.01, 0.1, 99))
    wanted = expected(kind, rows, torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same_bits(decoded(kind, rows, torch.float32), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_names_and_sizes_are_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    found = encoding(kind)
    assert (found.name, found.type_id) == (kind.name, kind.value)
    assert (found.block_elements, found.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_all_types_with_blocks_but_four_are_known() -> None:
    pytest.importorskip("transformers.integrations.gguf.dequant")
    with_blocks = [kind.name for kind, (elements, _) in gguf.GGML_QUANT_SIZES.items() if elements > 1]
    assert {kind.name for kind in TYPES} == set(with_blocks) - set(OTHERS)


def test_encodings_of_a_type_are_equal() -> None:
    assert block_encoding(12) == block_encoding(12) != block_encoding(13)
    assert len({block_encoding(14), block_encoding(14)}) == 1


def test_types_without_blocks_have_no_encoding() -> None:
    plain = ("F32", "F16", "BF16", "F64", "I8", "I32")
    assert [block_encoding(gguf.GGMLQuantizationType[name].value) for name in plain] == [None] * len(plain)
    assert block_encoding(1000) is None


def test_types_whose_code_book_is_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    monkeypatch.setattr(dequant, "GRID_SPECS", {})
    gguf_books.book.cache_clear()
    with pytest.raises(
        CheckpointError, match="IQ3_XXS blocks, whose code book Transformers has, but not in this version"
    ):
        block_encoding(18)


@pytest.mark.parametrize("type_id", [2, 3, 12])
def test_codes_scales_and_zeros_give_the_values(type_id: int) -> None:
    """Up to the last bits: (code - 8) * scale + zero is rounded otherwise than what the formulas of the types say."""
    encoding = block_encoding(type_id)
    assert encoding is not None
    assert encoding.integers is not None
    outputs, count = 6, 512 // encoding.block_elements
    generator = torch.Generator().manual_seed(type_id)
    blocks = torch.randint(0, 256, (outputs * count, encoding.block_bytes), generator=generator, dtype=torch.uint8)
    for start in (0,) if type_id == 2 else (0, 2):
        scales = torch.rand((len(blocks), 1), generator=generator).half()
        blocks[:, start : start + 2] = scales.view(torch.uint8)
    packed = blocks.view(outputs, -1)
    codes, scales, zeros = encoding.unpack([packed])
    assert codes.shape == (outputs, 512)
    assert int(codes.max()) == 15
    assert scales.shape == (outputs, 16)
    values = (codes.float().sub(8).unflatten(1, (16, 32)) * scales.unsqueeze(-1)) + (
        0 if zeros is None else zeros.unsqueeze(-1)
    )
    expected = torch.empty((outputs, 512))
    encoding.decode([packed], expected)
    torch.testing.assert_close(values.flatten(1), expected, rtol=1e-5, atol=1e-4)
