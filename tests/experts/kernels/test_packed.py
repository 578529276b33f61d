"""Matrices in oneDNN's own layout."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from needs import needs_packing

from promoe.experts.kernels import packed as under_test
from promoe.experts.kernels import proofs
from promoe.experts.kernels.packed import FEW_ROWS, MOST_ROWS, PRODUCTS_BEFORE_COMPARING, PackedMatrix, Packing
from promoe.stores.thread_memory import ThreadMemory

BF16 = torch.bfloat16
SHAPES = [(128, 64), (64, 128), (512, 192), (64, 2048)]


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_PRODUCTS", defaultdict(under_test._Products))
    monkeypatch.setattr(proofs, "_OF_FORMATS", {})


def packed(matrix: torch.Tensor, transposed: bool) -> PackedMatrix:
    packing = packing_of(tuple(matrix.shape), transposed)
    return packing.view(packing.pack(matrix))


def packing_of(shape: tuple[int, ...], transposed: bool = False) -> Packing:
    """Whatever bits one row has."""
    rows, columns = shape
    found = under_test._packing((rows, columns), transposed, BF16, torch.get_num_threads())
    assert found is not None
    return found


def verdicts() -> dict[int, bool | None]:
    """Number of rows -> verdict, of all kinds."""
    return {num_rows: proof.same for (_, _, _, num_rows), proof in proofs._OF_FORMATS.items()}  # type: ignore[misc]


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
        for _ in range(PRODUCTS_BEFORE_COMPARING + 1):  # also when it has been compared
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
    packing = packing_of((64, 512))

    def packed_in_order(*parts: torch.Tensor) -> Callable[[PackedMatrix, torch.Tensor], torch.Tensor]:
        multiply = in_order(*parts)
        return lambda matrix, x: multiply(x, matrix.dense())

    monkeypatch.setattr(torch, "mm", lambda x, factor: in_order(ALL)(x, factor.t()))
    monkeypatch.setattr(PackedMatrix, "multiply_packed", packed_in_order(ALL))
    assert under_test._compare(packing, num_rows)
    monkeypatch.setattr(under_test, "_LEAST_ROWS", 1)  # which is enough
    monkeypatch.setattr(PackedMatrix, "multiply_packed", packed_in_order(*ORDERS[order]))
    assert not under_test._compare(packing, num_rows)


@needs_packing
@pytest.mark.parametrize("shape", [(192, 9216), (64, 2048), (512, 192), (768, 2048)])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 16, 33])
def test_what_is_said_to_have_the_same_bits_has_them(shape: tuple[int, int], num_rows: int) -> None:
    packing = packing_of(shape)
    same = under_test._compare(packing, num_rows)
    generator = torch.Generator().manual_seed(99)
    spread = torch.arange(-12.0, 12.0).exp2()
    for _ in range(30):
        matrix, x = (torch.randn(size, generator=generator) for size in (shape, (num_rows, shape[1])))
        # Of few and of many magnitudes, and what nearly cancels out.
        for wide in (False, True):
            if wide:
                x = x * spread[torch.randint(len(spread), x.shape, generator=generator)]
                x[:, 1::2] = -x[:, ::2] * (1 + 2.0**-7)
            one, other = matrix.to(BF16), x.to(BF16)
            found = packing.view(packing.pack(one)).multiply_packed(other)
            assert not same or torch.equal(found, torch.mm(other, one.t()))


@needs_packing
@pytest.mark.parametrize("shape", [(64, 1024), (64, 4608), (192, 512), (1536, 2048)])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (4, 1), (2, 4)])
def test_the_layout_stays_when_the_number_of_threads_changes(shape: tuple[int, int], before: int, after: int) -> None:
    """oneDNN would choose another one by now."""
    torch.set_num_threads(before)
    if under_test._packing(shape, False, BF16, before) is None:
        pytest.skip(f"no layout that is known of {list(shape)} with {before} threads here")
    packing, matrix = packing_of(shape), torch.randn(shape).to(BF16)
    found = packing.view(packing.pack(matrix))
    torch.set_num_threads(after)
    assert torch.equal(found.dense(), matrix)
    assert torch.equal(packing.pack(matrix), found._memory)
    for num_rows in (1, 2, 8, 16):
        for _ in range(10):
            x = torch.randn(num_rows, shape[1]).to(BF16)
            assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    assert {(kind, threads) for kind, threads, _ in under_test._PRODUCTS} == {(packing, after)}


@needs_packing
def test_another_number_of_threads_may_have_another_layout() -> None:
    shape, found = (192, 512), {}
    for threads in (1, 4, 8, 1):
        torch.set_num_threads(threads)
        again = packing_of(shape)
        matrix = torch.randn(shape).to(BF16)
        packed_by_onednn = under_test.bytes_of(under_test.reorder(matrix))
        assert torch.equal(again.pack(matrix), packed_by_onednn)
        assert found.setdefault(threads, again) == again
    for one in found.values():
        for other in found.values():
            assert (one.block == other.block) == (one.signature == other.signature)


@needs_packing
def test_a_default_device_is_not_for_what_is_packed() -> None:
    matrix, x = torch.randn(128, 64).to(BF16), torch.randn(300, 64).to(BF16)
    found, shape = packed(matrix, False), (320, 64)  # which no other test has
    with torch.device("meta"):
        assert torch.equal(found.multiply(x, torch.empty(300, 128, dtype=BF16, device="cpu")), torch.mm(x, matrix.t()))
        assert torch.equal(found.multiply(x[:3].clone()), torch.mm(x[:3], matrix.t()))
        packing_of(shape)
    assert torch.equal(found.multiply(x), torch.mm(x, matrix.t()))


@needs_packing
def test_rows_that_lie_otherwise_are_multiplied_as_they_would_be() -> None:
    matrix = torch.randn(64, 4608).to(BF16)
    found = packed(matrix, False)
    for num_rows in (24, 32):
        x = torch.randn(4608, num_rows).to(BF16).t()
        for _ in range(PRODUCTS_BEFORE_COMPARING + 1):
            assert torch.equal(found.multiply(x), torch.mm(x, matrix.t()))


@needs_packing
def test_no_rows() -> None:
    assert packed(torch.randn(128, 64).to(BF16), False).multiply(torch.empty(0, 64, dtype=BF16)).shape == (0, 128)


@needs_packing
def test_where_bits_would_differ_matrices_are_unpacked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = PackedMatrix.multiply_packed

    def in_another_order(packed: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        matrix = packed.dense().float()
        return (x[:, :half].float() @ matrix[:, :half].t() + x[:, half:].float() @ matrix[:, half:].t()).to(x.dtype)

    def check(num_rows: int) -> None:
        x = torch.randn(num_rows, 512).to(BF16)
        assert torch.equal(product(found, x), torch.mm(x, matrix.t()))

    caplog.set_level(logging.INFO, "promoe")
    matrix = torch.randn(192, 512).to(BF16)
    found = packed(matrix, False)
    monkeypatch.setattr(PackedMatrix, "multiply_packed", in_another_order)
    check(4)
    check(6)
    (message,) = caplog.messages
    assert "With 1 threads, 4 rows have other bits when multiplied by packed matrices of shape [192, 512]" in message
    monkeypatch.setattr(PackedMatrix, "multiply_packed", real)
    check(5)
    assert verdicts() == {4: False, 6: False, 5: True}


@needs_packing
def test_it_is_said_when_every_token_takes_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(under_test, "_compare", lambda packing, num_rows: torch.get_num_threads() != 2)
    found = packed(torch.randn(128, 64).to(BF16), False)
    product(found, torch.randn(1, 64).to(BF16))
    assert caplog.messages == []
    torch.set_num_threads(2)
    for _ in range(2):
        product(found, torch.randn(1, 64).to(BF16))
    (message,) = caplog.messages
    assert "With 2 threads, one row has other bits" in message


@needs_packing
def test_what_one_row_has_other_bits_for_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_compare", lambda packing, num_rows: num_rows != 1)
    assert Packing.of((128, 64), False, BF16) is None
    torch.set_num_threads(2)  # which was not asked for yet
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
def test_many_rows_are_compared_when_they_were_often_multiplied(compared: list[int]) -> None:
    matrix = torch.randn(128, 64).to(BF16)
    found = packed(matrix, False)
    for num_rows in (FEW_ROWS, FEW_ROWS + 1, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(num_rows, 64).to(BF16)
        for times in range(1, PRODUCTS_BEFORE_COMPARING + 2):
            assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
            assert (num_rows in compared) == (
                num_rows <= MOST_ROWS and times >= (1 if num_rows <= FEW_ROWS else PRODUCTS_BEFORE_COMPARING)
            )
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
        for _ in range(PRODUCTS_BEFORE_COMPARING + 1):
            assert torch.equal(product(found, x), torch.mm(x, matrix.t()))
    assert compared == [40, 39, 20, 33, 32]


@needs_packing
def test_products_with_many_rows_take_memory_for_one_matrix_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    space, x = ThreadMemory(), torch.randn(MOST_ROWS + 1, 64).to(BF16)
    monkeypatch.setattr(under_test, "_MEMORY", space)
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
    packing_of(shape)


@needs_packing
def test_rows_of_another_dtype_are_multiplied_as_they_would_be() -> None:
    matrix = torch.randn(128, 64).to(BF16)
    with pytest.raises(RuntimeError, match="dtype"):
        product(packed(matrix, False), torch.randn(3, 64))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.randn(3, 64), matrix.t())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 64), torch.float32),
        ((96,), BF16),
        ((2, 96, 64), BF16),
        ((2**14, 2**12), BF16),
        ((64, 2), BF16),
        ((0, 64), BF16),
    ],
)
def test_what_is_not_packed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert Packing.of(shape, False, dtype) is None


def test_a_build_of_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Incomplete:
        complete = False

    monkeypatch.setattr(under_test, "library", Incomplete)
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
    kinds = [(enabled, num_rows) for _, _, enabled, num_rows in proofs._OF_FORMATS]  # type: ignore[misc]
    assert kinds == [(True, 4), (False, 4)]


@pytest.mark.parametrize("shape", [(128, 9216), (1024, 4096), (4096, 64), (64, 64)])
def test_a_signature_tells_rows_and_columns_apart(shape: tuple[int, int]) -> None:
    pattern = under_test._pattern(shape)
    assert len(pattern.unique(dim=0)) == shape[0]
    assert pattern.unique(dim=1).shape[1] == shape[1]
