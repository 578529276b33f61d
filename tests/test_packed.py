"""Matrices in oneDNN's own layout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from needs import needs_packing

from promoe import packed as under_test
from promoe.packed import FEW_ROWS, LATER, MOST_ROWS, PackedMatrix, Packing

BF16 = torch.bfloat16
SHAPES = [(128, 64), (64, 128), (512, 192), (64, 2048)]


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[Any, bool]:
    verdicts: dict[Any, bool] = {}
    monkeypatch.setattr(under_test, "_VERDICTS", verdicts)
    monkeypatch.setattr(under_test, "_UNCOMPARED", {})
    return verdicts


def packed(matrix: torch.Tensor, transposed: bool) -> PackedMatrix:
    packing = Packing.of(tuple(matrix.shape), transposed, matrix.dtype)
    assert packing is not None
    return packing.view(packing.pack(matrix))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that are compared."""
    found: list[int] = []
    real = under_test._compare

    def spy(packing: Packing, matrix: torch.Tensor, num_rows: int) -> bool:
        found.append(num_rows)
        return real(packing, matrix, num_rows)

    monkeypatch.setattr(under_test, "_compare", spy)
    return found


def product(matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), matrix.shape[1]), float("nan"), dtype=x.dtype)
    matrix.multiply(x, out)
    return out


@needs_packing
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_have_the_bits_of_the_models_layout(shape: tuple[int, int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator).to(BF16)
    factor = matrix if transposed else matrix.t()
    found = packed(matrix, transposed)
    assert found.shape == tuple(factor.shape)
    assert torch.equal(found.dense(), matrix)
    for num_rows in (1, 2, 7, 33, 130, 257):
        x = torch.randn((num_rows, factor.shape[0]), generator=generator).to(BF16)
        for _ in range(LATER + 1):  # also when it has been compared
            assert torch.equal(product(found, x), torch.mm(x, factor))


@needs_packing
def test_a_view_reads_what_is_in_its_memory_now() -> None:
    packing = Packing.of((128, 64), False, BF16)
    assert packing is not None
    matrices = [torch.randn(128, 64).to(BF16) for _ in range(2)]
    memory = torch.empty(packing.nbytes, dtype=torch.uint8)
    view, x = packing.view(memory), torch.randn(3, 64).to(BF16)
    for matrix in matrices:
        memory.copy_(packing.pack(matrix))
        assert torch.equal(product(view, x), torch.mm(x, matrix.t()))


@needs_packing
def test_packed_bytes_are_not_the_models() -> None:
    matrix = torch.randn(128, 64).to(BF16)
    packing = Packing.of((128, 64), False, BF16)
    assert packing is not None
    bytes_now = packing.pack(matrix)
    assert not torch.equal(bytes_now, matrix.view(-1).view(torch.uint8))
    assert torch.equal(bytes_now.sort().values, matrix.view(-1).view(torch.uint8).sort().values)


@needs_packing
def test_where_bits_would_differ_matrices_are_unpacked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = under_test._linear

    def in_another_order(x: torch.Tensor, opaque: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        matrix = opaque.to_dense().float()
        return (x[:, :half].float() @ matrix[:, :half].t() + x[:, half:].float() @ matrix[:, half:].t()).to(x.dtype)

    matrix, x = torch.randn(192, 512).to(BF16), torch.randn(4, 512).to(BF16)
    found = packed(matrix, False)
    monkeypatch.setattr(under_test, "_linear", in_another_order)
    assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    assert "have not the same bits for 4 rows" in caplog.text
    monkeypatch.setattr(under_test, "_linear", real)
    other = torch.randn(5, 512).to(BF16)
    assert torch.equal(product(found, other), torch.mm(other, matrix.t()))
    assert [verdict for key, verdict in under_test._VERDICTS.items()] == [False, True]  # of 4 rows, of 5


@needs_packing
def test_each_number_of_rows_and_of_threads_is_compared_once(
    compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (packed(torch.randn(128, 64).to(BF16), False) for _ in range(2))
    for num_rows in (1, 3, 1, 3):
        for matrix in (first, second):
            product(matrix, torch.randn(num_rows, 64).to(BF16))
    assert compared == [1, 3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    product(first, torch.randn(1, 64).to(BF16))
    assert compared == [1, 3, 1]


@needs_packing
def test_many_rows_are_compared_when_they_were_often_multiplied(compared: list[int]) -> None:
    matrix = torch.randn(128, 64).to(BF16)
    found = packed(matrix, False)
    for num_rows in (FEW_ROWS, FEW_ROWS + 1, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(num_rows, 64).to(BF16)
        for times in range(1, LATER + 2):
            assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
            assert (num_rows in compared) == (num_rows <= MOST_ROWS and times >= (1 if num_rows <= FEW_ROWS else LATER))
    assert compared == [FEW_ROWS, FEW_ROWS + 1, MOST_ROWS]


@needs_packing
def test_products_with_many_rows_take_memory_for_one_matrix_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    space, x = under_test._Space(), torch.randn(MOST_ROWS + 1, 64).to(BF16)
    monkeypatch.setattr(under_test, "_SPACE", space)
    matrices = [torch.randn(size, 64).to(BF16) for size in (64, 128, 64, 128)]

    def multiply_all() -> int:
        for matrix in matrices:
            assert torch.equal(packed(matrix, False).multiply(x), torch.mm(x, matrix.t()))
        return space.of((128, 64), BF16).data_ptr()

    assert multiply_all() == multiply_all()
    assert space.of((64, 64), BF16).data_ptr() == multiply_all()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(multiply_all).result() != multiply_all()


@needs_packing
def test_a_layout_that_is_not_known_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "BLOCKS", (2,))
    shape = (256, 96)  # which no other test has
    assert Packing.of(shape, False, BF16) is None
    monkeypatch.undo()
    under_test._packing.cache_clear()
    assert Packing.of(shape, False, BF16) is not None


@needs_packing
def test_rows_of_another_dtype_are_multiplied_as_they_would_be() -> None:
    matrix = torch.randn(128, 64).to(BF16)
    with pytest.raises(RuntimeError, match="dtype"):
        product(packed(matrix, False), torch.randn(3, 64))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.randn(3, 64), matrix.t())


@pytest.mark.parametrize(
    ("shape", "dtype"), [((128, 64), torch.float32), ((96,), BF16), ((2, 96, 64), BF16), ((2**14, 2**12), BF16)]
)
def test_what_is_not_packed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert Packing.of(shape, False, dtype) is None


def test_a_build_of_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Incomplete:
        complete = False

    monkeypatch.setattr(under_test, "_library", Incomplete)
    assert Packing.of((128, 64), False, BF16) is None


@needs_packing
def test_signatures_tell_layouts_apart() -> None:
    found = [Packing.of(shape, transposed, BF16) for shape in SHAPES for transposed in (False, True)]
    signatures = [packing.signature for packing in found if packing is not None]
    assert len(set(signatures)) == len(SHAPES) * 2
    again = Packing.of(SHAPES[0], False, BF16)
    assert again is not None
    assert again.signature == signatures[0]


@needs_packing
@pytest.mark.filterwarnings("ignore:TF32")
def test_it_is_compared_anew_where_torch_goes_without_onednn() -> None:
    matrix, x = torch.randn(192, 512).to(BF16), torch.randn(4, 512).to(BF16)
    found = packed(matrix, False)
    assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    assert len(under_test._VERDICTS) == 2


@pytest.mark.parametrize("shape", [(128, 9216), (1024, 4096), (4096, 64), (64, 64)])
def test_a_signature_tells_rows_and_columns_apart(shape: tuple[int, int]) -> None:
    pattern = under_test._pattern(shape)
    assert len(pattern.unique(dim=0)) == shape[0]
    assert pattern.unique(dim=1).shape[1] == shape[1]
