"""Products in fp32: their values, when they are used, and what is said about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from served import PROMPTS, LinkOver, checkpoint, close, config, greedy, plain_link, stock

import promoe
from promoe.errors import ConfigError
from promoe.experts.kernels import fast
from promoe.experts.kernels.fast import Difference, FastProducts, multiply_widened, widened_from
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.kernels.int8 import Int8Format
from promoe.experts.kernels.matrices import product
from promoe.stores.layout import TensorSpec

FAMILY = "qwen3_moe"


def matrix_in(form: str, shape: tuple[int, int], transposed: bool, seed: int = 0) -> Any:
    """A matrix as kernels get it, `[in, out]`, and its values."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    if form == "plain":
        factor = plain if transposed else plain.t()
        return factor, factor.float()
    slot_format: Any = {"int8": Int8Format(), "int4": Int4Format(4, 32)}[form]
    made = slot_format.of(TensorSpec("w", shape, torch.bfloat16, 0), transposed)
    quantised = made.view(made.pack(plain))
    dense = quantised.dense()
    return quantised, (dense if transposed else dense.t()).float()


@pytest.mark.parametrize("widened_bytes", [4, 2**15, 2**30])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", ["plain", "int8", "int4"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_the_product_is_that_in_fp32(
    num_rows: int, form: str, transposed: bool, widened_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "WIDENED_BYTES", widened_bytes)
    matrix, values = matrix_in(form, (128, 192), transposed)
    x = torch.randn((num_rows, values.shape[0]), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    # As a part of a larger tensor, which has to stay as it is beside it.
    memory = torch.full((num_rows + 2, values.shape[1]), 7.0, dtype=torch.bfloat16)
    found = multiply_widened(x, matrix, memory[1:-1])
    expected = x.double() @ values.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)
    assert bool((memory[0] == 7).all())
    assert bool((memory[-1] == 7).all())


def test_from_how_many_rows_on_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first number of rows for which widening took less time, in the median of rounds."""
    exact, widened = [], []

    def seconds(run: Any) -> float:
        of_exact = run.func is product
        (exact if of_exact else widened).append(len(run.args[0]))
        return 1.0 if of_exact else 3.0 / len(run.args[0])

    monkeypatch.setattr(fast, "seconds_of", seconds)
    matrix = torch.randn(72, 40).to(torch.bfloat16).t()
    assert widened_from(matrix) == 4
    assert sorted(set(exact)) == sorted(set(widened)) == [1, 2, 4]
    assert len(exact) == 3 * (fast.ROUNDS + 1)
    assert widened_from(matrix.clone(memory_format=torch.preserve_format)) == 4
    assert len(exact) == 3 * (fast.ROUNDS + 1)
    assert widened_from(torch.randn(72, 40)) is None, "fp32 is what others are widened to"


def test_how_far_products_are() -> None:
    difference = Difference()
    exact = torch.tensor([[3.0, -4.0, 0.0, 0.0]])  # root mean square 2.5
    difference.add(torch.tensor([[3.0, -4.5, 0.0, 0.25]]), exact)
    assert (difference.compared, difference.share_equal) == (4, 0.5)
    assert difference.largest == pytest.approx(0.2)
    assert difference.mean == pytest.approx((0.2 + 0.1) / 4)
    difference.add(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert difference.compared == 4


def test_the_first_product_of_each_kind_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "widened_from", lambda matrix: 2)
    products = FastProducts()
    assert products.in_words == "fast; no product took less time than the exact one"
    matrix, _ = matrix_in("plain", (64, 128), False)
    x = torch.randn(3, 128).to(torch.bfloat16)
    assert torch.equal(products.multiply("a", x[:1], matrix), product(x[:1], matrix))
    assert products.difference.compared == 0
    for kind in ("a", "a", "b"):
        found = products.multiply(kind, x, matrix)
        assert torch.equal(found, multiply_widened(x, matrix, torch.empty_like(found)))
    assert products.difference.compared == 2 * 3 * 64
    assert "of the elements of products have the exact bits" in products.in_words


# -- whole models -----------------------------------------------------------------------------------------------


def answered(cache: str, prompt: str, experts: str = "auto", **fields: Any) -> tuple[Any, promoe.Stats]:
    settings = config(**{"kernels": "fast", **fields})
    folder = checkpoint(FAMILY, torch.bfloat16)
    model = promoe.from_pretrained(folder, experts=experts, cache=cache, link=LinkOver(plain_link), config=settings)
    try:
        return greedy(model, PROMPTS[prompt]), model.promoe.stats()
    finally:
        close(model)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_bits_do_not_depend_on_what_is_in_memory(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "widened_from", lambda matrix: 1)
    expected, stats = answered("100%", prompt, bypass=True)
    assert stats.kernels.startswith("fast; ")
    assert "the others differ by up to" in stats.kernels
    assert "the others differ by up to" in stats.summary().replace("\n", " ").replace("  ", "")
    for cache in ("1 per layer", "30%"):
        answered(cache, prompt)[0].assert_equals(expected)
    exact = greedy(stock(FAMILY, torch.bfloat16), PROMPTS[prompt])
    for one, other in zip(expected.logits, exact.logits, strict=True):
        if one.shape == other.shape:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_where_nothing_is_faster_the_bits_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "widened_from", lambda matrix: None)
    found, stats = answered("30%", "padded")
    found.assert_equals(greedy(stock(FAMILY, torch.bfloat16), PROMPTS["padded"]))
    assert stats.kernels == "fast; no product took less time than the exact one"


def test_where_experts_are_not_computed_from_slots_on_a_cpu_it_is_refused() -> None:
    model = stock(FAMILY, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"they stay in the model's own tensors.*promoe\.from_pretrained"):
        promoe.patch(model, config=config(kernels="fast"))
    assert not hasattr(model, "promoe")
    with pytest.raises(ConfigError, match="'kernels' field"):
        config(kernels="quick")
