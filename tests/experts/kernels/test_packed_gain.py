"""What is worth packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs_packing

from promoe.experts.kernels import packed_gain
from promoe.experts.kernels.packed import PackedMatrix, Packing
from promoe.experts.kernels.packed_gain import gain_of, gaining

pytestmark = needs_packing


def packing_of(shape: tuple[int, int], transposed: bool = False) -> Packing:
    found = Packing.of(shape, transposed, torch.bfloat16)
    assert found is not None
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_how_long_plain_ones_take_over_packed_ones(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []
    mm, multiply = torch.mm, PackedMatrix.multiply

    def plain(*args: Any, **options: Any) -> torch.Tensor:
        products.append("plain")
        return mm(*args, **options)

    def packed(*args: Any) -> torch.Tensor:
        products.append("packed")
        return multiply(*args)

    rounds: list[set[str]] = []

    def timed(run: Callable[[], None]) -> float:
        products.clear()
        run()
        rounds.append(set(products))
        assert len(products) == packed_gain.MOST_MATRICES
        first = len(rounds) <= 2  # which does not count
        return {"plain": 9.0 if first else 3.0, "packed": 1.0 if first else 2.0}[products[0]]

    packing = packing_of((256, 64), transposed)
    monkeypatch.setattr(torch, "mm", plain)
    monkeypatch.setattr(PackedMatrix, "multiply", packed)
    monkeypatch.setattr(packed_gain, "_seconds", timed)
    assert packed_gain._gain_of.__wrapped__(packing, 1) == 1.5
    assert rounds == [{"plain"}, {"packed"}] * (packed_gain.ROUNDS + 1)


def test_it_is_measured_once_for_each_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def timed(multiply: Callable[[], None]) -> float:
        measured.append(1.0)
        return 1.0

    monkeypatch.setattr(packed_gain, "_seconds", timed)
    packed_gain._gain_of.cache_clear()
    for _ in range(3):
        assert gain_of(packing_of((256, 64))) == 1.0
    assert len(measured) == 2 * (packed_gain.ROUNDS + 1)
    packed_gain._gain_of.cache_clear()


def test_what_gains_too_little_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good, poor = packing_of((128, 64)), packing_of((256, 64))
    monkeypatch.setattr(packed_gain, "LEAST_GAIN", 1.05)
    monkeypatch.setattr(packed_gain, "gain_of", {good: 1.05, poor: 1.04}.__getitem__)
    both, one, none = object(), object(), object()
    found = gaining({both: {"a": good, "b": good}, one: {"a": poor, "b": good}, none: {"a": poor}})  # type: ignore[dict-item]
    assert found == {both: {"a": good, "b": good}, one: {"b": good}}
