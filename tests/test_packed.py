"""Matrices in oneDNN's own layout."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from needs import needs_packing

from promoe import packed as under_test
from promoe.packed import FEW_ROWS, LATER, MOST_ROWS, PackedMatrix, Packing

BF16 = torch.bfloat16
SHAPES = [(128, 64), (64, 128), (512, 192), (64, 2048)]


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_VERDICTS", defaultdict(under_test._Verdicts))


def packed(matrix: torch.Tensor, transposed: bool) -> PackedMatrix:
    rows, columns = matrix.shape
    packing = under_test._packing((rows, columns), transposed, matrix.dtype)  # whatever one row has
    assert packing is not None
    return packing.view(packing.pack(matrix))


def verdicts() -> dict[int, bool]:
    """Number of rows -> verdict, of all kinds."""
    return {rows: same for kind in under_test._VERDICTS.values() for rows, same in kind.same.items()}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that are compared."""
    found: list[int] = []
    real = under_test._compare

    def spy(packing: Packing, num_rows: int) -> bool:
        found.append(num_rows)
        return real(packing, num_rows)

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


def in_order(*parts: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product that adds up each of these columns in turn, in fp32, and then the sums."""

    def multiply(x: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), len(linear))
        for columns in parts:
            found = torch.zeros_like(total)
            for column in columns.tolist():
                found += torch.outer(x[:, column].float(), linear[:, column].float())
            total += found
        return total.to(x.dtype)

    return multiply


ALL = torch.arange(512)
ORDERS = {
    "the first 8 apart": (ALL[:8], ALL[8:]),
    "halves": (ALL[:256], ALL[256:]),
    "quarters": tuple(ALL.split(128)),
    "the last 32 apart": (ALL[:-32], ALL[-32:]),
    "the last 8 apart": (ALL[:-8], ALL[-8:]),
    "even and odd": (ALL[::2], ALL[1::2]),
    "twos the other way round": (ALL.view(-1, 2).flip(1).reshape(-1),),
    "backwards": (ALL.flip(0),),
    "the last block first": (torch.cat([ALL[-64:], ALL[:-64]]),),
}


@needs_packing
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_another_order_of_additions_is_seen(order: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Packing.of((64, 512), False, BF16)
    assert packing is not None
    assert under_test._compare(packing, num_rows)
    monkeypatch.setattr(under_test, "_reorder", lambda linear: linear)
    monkeypatch.setattr(torch, "mm", lambda x, factor: in_order(ALL)(x, factor.t()))
    monkeypatch.setattr(under_test, "_linear", in_order(ALL))
    assert under_test._compare(packing, num_rows)
    monkeypatch.setattr(under_test, "_LEAST_ROWS", 1)  # which is enough
    monkeypatch.setattr(under_test, "_linear", in_order(*ORDERS[order]))
    assert not under_test._compare(packing, num_rows)


@needs_packing
@pytest.mark.parametrize("shape", [(192, 9216), (64, 2048), (512, 192), (768, 2048)])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 16, 33])
def test_what_is_said_to_have_the_same_bits_has_them_whatever_is_multiplied(
    shape: tuple[int, int], num_rows: int
) -> None:
    packing = under_test._packing(shape, False, BF16)
    assert packing is not None
    if under_test._compare(packing, num_rows):
        generator = torch.Generator().manual_seed(99)
        for _ in range(20):
            x, linear = under_test._telling(packing, num_rows, generator)
            found = under_test._linear(x, under_test._reorder(linear))
            assert torch.equal(found, torch.mm(x, linear.t()))


@needs_packing
def test_where_bits_would_differ_matrices_are_unpacked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = under_test._linear

    def in_another_order(x: torch.Tensor, opaque: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        matrix = opaque.to_dense().float()
        return (x[:, :half].float() @ matrix[:, :half].t() + x[:, half:].float() @ matrix[:, half:].t()).to(x.dtype)

    def check(num_rows: int) -> None:
        x = torch.randn(num_rows, 512).to(BF16)
        assert torch.equal(product(found, x), torch.mm(x, matrix.t()))

    caplog.set_level(logging.INFO, "promoe")
    matrix = torch.randn(192, 512).to(BF16)
    found = packed(matrix, False)
    monkeypatch.setattr(under_test, "_linear", in_another_order)
    check(4)
    check(6)
    (message,) = caplog.messages
    assert "shape [192, 512] have not the same bits for 4 rows" in message
    monkeypatch.setattr(under_test, "_linear", real)
    check(5)
    assert verdicts() == {4: False, 6: False, 5: True}


@needs_packing
def test_what_one_row_has_other_bits_for_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_compare", lambda packing, num_rows: num_rows != 1)
    assert Packing.of((128, 64), False, BF16) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # has never been asked
    monkeypatch.setattr(under_test, "_compare", lambda packing, num_rows: True)
    assert Packing.of((128, 64), False, BF16) is not None


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
def test_many_rows_are_compared_when_they_were_often_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(under_test, "_compare", lambda packing, num_rows: compared.append(num_rows) is None)
    matrix = torch.randn(128, 64).to(BF16)
    found = packed(matrix, False)
    for num_rows in (FEW_ROWS, FEW_ROWS + 1, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(num_rows, 64).to(BF16)
        for times in range(1, LATER + 2):
            product(found, x)
            assert (num_rows in compared) == (num_rows <= MOST_ROWS and times >= (1 if num_rows <= FEW_ROWS else LATER))
    assert compared == [FEW_ROWS, FEW_ROWS + 1, MOST_ROWS]


@needs_packing
def test_more_rows_than_have_other_bits_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(packing: Packing, num_rows: int) -> bool:
        compared.append(num_rows)
        return num_rows < 33

    monkeypatch.setattr(under_test, "_compare", compare)
    matrix = torch.randn(128, 64).to(BF16)
    found = packed(matrix, False)
    for num_rows in (40, 41, 39, 20, 33, 34, 32):
        x = torch.randn(num_rows, 64).to(BF16)
        for _ in range(LATER + 1):
            assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    assert compared == [40, 39, 20, 33, 32]


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
    assert [list(kind.same) for kind in under_test._VERDICTS.values()] == [[4], [4]]


@pytest.mark.parametrize("shape", [(128, 9216), (1024, 4096), (4096, 64), (64, 64)])
def test_a_signature_tells_rows_and_columns_apart(shape: tuple[int, int]) -> None:
    pattern = under_test._pattern(shape)
    assert len(pattern.unique(dim=0)) == shape[0]
    assert pattern.unique(dim=1).shape[1] == shape[1]
