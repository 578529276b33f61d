"""Quantised matrices in slots: bytes, products, and what they fall back to."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from promoe.experts.kernels import crossover, int4, quantized
from promoe.experts.kernels.int4 import BLOCKS, Int4, Int4Format, kernel_block
from promoe.experts.kernels.int8 import Int8, Int8Format
from promoe.experts.kernels.quantization import METHODS, quantize_groups, quantize_rows
from promoe.experts.kernels.quantized import Quantized, has_kernel
from promoe.stores.layout import TensorSpec
from promoe.stores.thread_memory import ThreadMemory

SHAPE = (192, 256)  # [out, in]: blocks of 64 and of 32
BLOCK = kernel_block() or 64


def formats(transposed: bool, dense_from: int | None = None) -> list[Quantized]:
    shape = SHAPE[::-1] if transposed else SHAPE
    grouped = [Int4(shape, transposed, dense_from, bits, group, BLOCK) for bits in (4, 3, 2) for group in (32, 64, 128)]
    return [Int8(shape, transposed, dense_from), *grouped]


def weights(transposed: bool = False, seed: int = 0) -> torch.Tensor:
    found = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) / 16).to(torch.bfloat16)
    return found.t().contiguous() if transposed else found


def rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((count, SHAPE[1]), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def formula(made: Quantized, matrix: torch.Tensor) -> torch.Tensor:
    """The weights `[out, in]` that the formulas in `quantization` give, each rounded to bf16 once."""
    linear = matrix.t() if made.transposed else matrix
    if isinstance(made, Int8):
        codes, scales = quantize_rows(linear)
        return (codes.float() * scales.float().unsqueeze(1)).to(torch.bfloat16)
    assert isinstance(made, Int4)
    codes, scales, zeros = quantize_groups(linear, made.bits, made.group, METHODS["rtn"])
    by_group = (codes.float() - 2 ** (made.bits - 1)).unflatten(1, (-1, made.group))
    exact = by_group.double() * scales.double().unsqueeze(2) + zeros.double().unsqueeze(2)
    return exact.flatten(1).float().to(torch.bfloat16)


def factor(made: Quantized) -> torch.Tensor:
    """The same as a right factor `[in, out]`, in the order of elements in which the format has it: bits depend on that."""
    found = made.expand(made.parts(made.pack(weights())), ThreadMemory())
    assert torch.equal(found.t(), formula(made, weights()))
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_a_slot_holds_what_the_formulas_say(transposed: bool) -> None:
    matrix = weights(transposed)
    for made in formats(transposed):
        dense = made.view(made.pack(matrix)).dense()
        assert dense.shape == matrix.shape
        assert dense.is_contiguous()
        assert torch.equal(dense.t() if transposed else dense, formula(made, matrix)), made


def test_bytes_are_bits_and_scales() -> None:
    count, outputs = SHAPE[0] * SHAPE[1], SHAPE[0]
    for made in formats(transposed=False):
        if isinstance(made, Int8):
            assert made.nbytes == count + 2 * outputs
        else:
            assert isinstance(made, Int4)
            assert made.nbytes == count * made.bits // 8 + 4 * count // made.group
        assert made.nbytes == len(made.pack(weights()))
        assert made.bits_per_weight == 8 * made.nbytes / count


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_the_weights(transposed: bool) -> None:
    """To the accuracy of bf16: torch's kernels do not round weights first."""
    for made in formats(transposed):
        matrix = made.view(made.pack(weights(transposed)))
        assert matrix.shape == SHAPE[::-1]
        for count in (1, 2, 7, 64, 100):
            x = rows(count)
            expected = x.float() @ formula(made, weights(transposed)).float().t()
            error = (matrix.multiply(x).float() - expected).norm() / expected.norm()
            assert error < 0.01, (made, count)


def test_three_and_two_bits_have_the_bits_of_four() -> None:
    """Their codes, moved to the middle of 4 bits, are the same codes in fewer bytes."""
    for bits in (3, 2):
        small = Int4(SHAPE, False, None, bits, 64, BLOCK)
        memory = small.pack(weights())
        large = replace(small, bits=4)
        codes, scales_and_zeros = small.parts(memory)
        whole = torch.cat([small._in_blocks(codes), scales_and_zeros.flatten().view(torch.uint8)])
        for count in (1, 5, 33):
            assert torch.equal(small.view(memory).multiply(rows(count)), large.view(whole).multiply(rows(count)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_is_multiplied_with_it(threads: int) -> None:
    torch.set_num_threads(threads)
    x = rows(70)
    for made in formats(transposed=False):
        matrix = made.view(made.pack(weights()))
        whole = matrix.multiply(x)
        for count in (*range(1, 34), 64):
            assert torch.equal(matrix.multiply(x[:count]), whole[:count]), (made, count)


@pytest.mark.parametrize("offset", [64, 4096, 4096 + 64])
def test_a_view_reads_its_memory_wherever_it_lies_and_each_time(offset: int) -> None:
    for made in formats(transposed=False):
        pool = torch.zeros(offset + made.nbytes + 64, dtype=torch.uint8)
        memory = pool[offset : offset + made.nbytes]
        matrix = made.view(memory)
        for seed in (0, 1):
            packed = made.pack(weights(seed=seed))
            memory.copy_(packed)
            assert torch.equal(matrix.multiply(rows(3)), made.view(packed).multiply(rows(3)))
            assert torch.equal(matrix.dense(), made.view(packed).dense())


def test_from_so_many_rows_on_it_is_the_expanded_matrix() -> None:
    for made in formats(transposed=False, dense_from=16):
        matrix = made.view(made.pack(weights()))
        few = replace(made, dense_from=None).view(made.pack(weights()))
        assert torch.equal(matrix.multiply(rows(15)), few.multiply(rows(15)))
        for count in (16, 40):
            x = rows(count)
            assert torch.equal(matrix.multiply(x), torch.mm(x, factor(made)))
            out = torch.empty((count, SHAPE[0]), dtype=torch.bfloat16)
            assert matrix.multiply(x, out) is out
            assert torch.equal(out, matrix.multiply(x))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_matrix_is_expanded_some_outputs_at_a_time(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In little memory, with the same weights."""
    monkeypatch.setattr(quantized, "_DENSE", memory := ThreadMemory())
    monkeypatch.setattr(quantized, "EXPANDED_BYTES", nbytes := 2 * 64 * SHAPE[1])
    for made in formats(transposed, dense_from=1):
        x, expected = rows(20), []
        for first in range(0, SHAPE[0], 64):
            linear = formula(made, weights(transposed))[first : first + 64]
            expected.append(x.float() @ linear.float().t())
        matrix = made.view(made.pack(weights(transposed)))
        found = matrix.multiply(x)
        assert torch.allclose(found.float(), torch.cat(expected, 1), rtol=0.01, atol=0.02), made
        assert torch.equal(matrix.multiply(x, out := torch.empty_like(found)), found)
        assert torch.equal(out, found)
    assert len(memory._memory) == nbytes


def test_no_rows_and_rows_that_lie_otherwise() -> None:
    for made in formats(transposed=False):
        matrix = made.view(made.pack(weights()))
        assert matrix.multiply(rows(0)).shape == (0, SHAPE[0])
        x = rows(6)
        strided = torch.stack((x, x), dim=2)[:, :, 0]
        assert not strided.is_contiguous()
        assert torch.equal(matrix.multiply(strided), matrix.multiply(x))
        assert torch.equal(matrix.multiply(x, x.new_empty((6, SHAPE[0]))), matrix.multiply(x))


def test_weights_in_a_poisoned_slot_are_nan() -> None:
    """A slot without its expert shows: bytes of ones are NaN as scales."""
    for made in formats(transposed=False):
        matrix = made.view(torch.full((made.nbytes,), 255, dtype=torch.uint8))
        assert matrix.multiply(rows(2)).isnan().all()
        assert matrix.dense().isnan().all()


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_without_torchs_kernel_it_is_the_expanded_matrix(
    kind: type[Quantized], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*args: object) -> torch.Tensor:
        raise NotImplementedError("injected")

    made = next(one for one in formats(transposed=False) if isinstance(one, kind))
    monkeypatch.setattr(kind, "product", missing)
    has_kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            matrix = made.view(made.pack(weights()))
        assert f"no product by {kind.smallest().name} matrices, so they are expanded: injected" in caplog.text
        x = rows(3)
        assert torch.equal(matrix.multiply(x), torch.mm(x, factor(made)))
    finally:
        has_kernel.cache_clear()


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_kernel_that_reads_another_layout_is_not_used(
    kind: type[Quantized], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    product = kind.product

    def in_another_order(made: Quantized, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return product(made, x, parts).flip(1)

    monkeypatch.setattr(kind, "product", in_another_order)
    has_kernel.cache_clear()
    try:
        assert not has_kernel(kind)
        assert "another layout" in caplog.text
    finally:
        has_kernel.cache_clear()


def test_this_build_of_torch_has_the_kernels() -> None:
    """On the processors that promoe is tested on. If this fails, quantised experts are served, but slowly."""
    assert has_kernel(Int8)
    assert has_kernel(Int4)
    assert kernel_block() in BLOCKS


def spec(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec("down_proj", shape, dtype, 0)


@pytest.mark.parametrize("slot_format", [Int8Format(), Int4Format(4), Int4Format(3, 32), Int4Format(2)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 96), torch.bfloat16),
        ((32, 64), torch.bfloat16),
        ((64,), torch.bfloat16),
        ((2, 64, 64), torch.bfloat16),
        ((64, 64), torch.float32),
        ((64, 64), torch.float16),
    ],
)
def test_other_matrices_stay_plain(slot_format: Int8Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert slot_format.of(spec(shape, dtype), False) is None


def test_a_group_must_divide_the_inputs() -> None:
    assert Int4Format(4, 128).of(spec((64, 64)), False) is None
    assert Int4Format(4, 128).of(spec((128, 64)), False) is None
    assert Int4Format(4, 128).of(spec((128, 64)), True) is not None


@pytest.mark.parametrize("transposed", [False, True])
def test_a_signature_gives_the_format_back(transposed: bool) -> None:
    for made in formats(transposed, dense_from=32):
        slot_format = Int8Format() if isinstance(made, Int8) else Int4Format(getattr(made, "bits", 4))
        assert slot_format.read(spec(made.shape), transposed, made.signature) == made
        assert slot_format.read(spec(made.shape), not transposed, made.signature) is None
        assert slot_format.read(spec((64, 64)), transposed, made.signature) is None


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5},
        {"bits": 3},
        {"group": 48},
        {"block": 16},
        {"dense_from": 0},
        {"dense_from": "many"},
        {"shape": None},
        {"more": 1},
    ],
)
def test_another_signature_is_not_read(change: dict[str, object]) -> None:
    made = Int4(SHAPE, False, None, 4, 64, BLOCK)
    fields = json.loads(made.signature)
    assert Int4Format(4).read(spec(SHAPE), False, json.dumps(fields)) == made
    assert Int4Format(4).read(spec(SHAPE), False, json.dumps(fields | change)) is None
    assert Int4Format(4).read(spec(SHAPE), False, "{") is None


@pytest.mark.parametrize("kernel_block", [32, 64, None])
def test_any_block_is_read_but_may_not_fit_the_processor(
    kernel_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "kernel_block", lambda: kernel_block)
    for block in BLOCKS:
        made = Int4(SHAPE, False, None, 4, 64, block)
        assert Int4Format(4).read(spec(SHAPE), False, made.signature) == made
        assert made.fits_processor == (kernel_block in (None, block))
        assert torch.equal(made.expand(made.parts(made.pack(weights())), ThreadMemory()).t(), formula(made, weights()))


@pytest.mark.parametrize(("expanded_from", "found"), [(8, 8), (64, 64), (1000, None)])
def test_how_many_rows_it_takes_is_measured(
    expanded_from: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(
        time
        for count in reversed(crossover.ROWS)
        for _ in range(crossover.ROUNDS + 1)
        for time in ((2.0, 1.0) if count >= expanded_from else (1.0, 2.0))
    )
    monkeypatch.setattr(crossover, "seconds_of", lambda run: next(times))
    made = Int8((64, 64), False, None)
    assert crossover._dense_from.__wrapped__(made, torch.get_num_threads()) == found


def test_without_a_kernel_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "has_kernel", lambda kind: False)
    monkeypatch.setattr(crossover, "seconds_of", lambda run: pytest.fail("measured"))
    assert crossover._dense_from.__wrapped__(Int8((64, 64), False, None), 1) is None
