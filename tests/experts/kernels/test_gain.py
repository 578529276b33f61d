"""How much faster a product is in another format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs_packing

from promoe.experts.kernels import gain
from promoe.experts.kernels.gain import gain_of
from promoe.experts.kernels.packed import PackedMatrix, Packing

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
        assert len(products) == gain.MOST_MATRICES
        first = len(rounds) <= 2  # which does not count
        return {"plain": 9.0 if first else 3.0, "packed": 1.0 if first else 2.0}[products[0]]

    packing = packing_of((256, 64), transposed)
    monkeypatch.setattr(torch, "mm", plain)
    monkeypatch.setattr(PackedMatrix, "multiply", packed)
    monkeypatch.setattr(gain, "seconds_of", timed)
    assert gain._gain_of.__wrapped__(packing, 1) == 1.5
    assert rounds == [{"plain"}, {"packed"}] * (gain.ROUNDS + 1)


def test_it_is_measured_once_for_each_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def timed(multiply: Callable[[], None]) -> float:
        measured.append(1.0)
        return 1.0

    monkeypatch.setattr(gain, "seconds_of", timed)
    gain._gain_of.cache_clear()
    for _ in range(3):
        assert gain_of(packing_of((256, 64))) == 1.0
    assert len(measured) == 2 * (gain.ROUNDS + 1)
    gain._gain_of.cache_clear()
