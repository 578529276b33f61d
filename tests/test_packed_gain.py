"""What is worth packing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from needs import needs_packing

from promoe import packed_gain
from promoe.packed import Packing
from promoe.packed_gain import gain_of, gaining

pytestmark = needs_packing


def packing_of(shape: tuple[int, int], transposed: bool = False) -> Packing:
    found = Packing.of(shape, transposed, torch.bfloat16)
    assert found is not None
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_how_long_plain_ones_take_over_packed_ones(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 1.0, *[3.0, 2.0] * packed_gain.ROUNDS])  # the first round does not count
    run: list[Callable[[], None]] = []

    def timed(multiply: Callable[[], None]) -> float:
        multiply()
        run.append(multiply)
        return next(seconds)

    monkeypatch.setattr(packed_gain, "_seconds", timed)
    assert gain_of.__wrapped__(packing_of((256, 64), transposed)) == 1.5
    assert len(run) == 2 * (packed_gain.ROUNDS + 1)
    assert len(set(run)) == 2


def test_it_is_measured_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def timed(multiply: Callable[[], None]) -> float:
        measured.append(1.0)
        return 1.0

    monkeypatch.setattr(packed_gain, "_seconds", timed)
    gain_of.cache_clear()
    for _ in range(3):
        assert gain_of(packing_of((256, 64))) == 1.0
    assert len(measured) == 2 * (packed_gain.ROUNDS + 1)
    gain_of.cache_clear()


def test_what_gains_too_little_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good, poor = packing_of((128, 64)), packing_of((256, 64))
    monkeypatch.setattr(packed_gain, "LEAST_GAIN", 1.05)
    monkeypatch.setattr(packed_gain, "gain_of", {good: 1.05, poor: 1.04}.__getitem__)
    both, one, none = object(), object(), object()
    found = gaining({both: {"a": good, "b": good}, one: {"a": poor, "b": good}, none: {"a": poor}})  # type: ignore[dict-item]
    assert found == {both: {"a": good, "b": good}, one: {"b": good}}
