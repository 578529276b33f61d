"""The experts that forecasts want, by deadline."""

from __future__ import annotations

import pytest

from promoe.scheduler.speculation import Speculation


def order(wishes: Speculation) -> list[int]:
    codes = []
    while (code := wishes.most_urgent()) is not None:
        codes.append(code)
        wishes.skip()
    return codes


def wanted(wishes: Speculation) -> list[int]:
    return [code for code in range(30) if wishes.wants(code // 10, code)]


def test_earliest_deadline_first_then_most_probable() -> None:
    wishes = Speculation()
    wishes.replace(2, 12, [(20, 0.9), (21, 0.99)])
    wishes.replace(1, 11, [(10, 0.5), (11, 0.7)])
    assert order(wishes) == [11, 10, 21, 20]


def test_a_forecast_replaces_its_layers_wishes() -> None:
    wishes = Speculation()
    wishes.replace(1, 11, [(10, 0.5), (11, 0.7)])
    wishes.replace(2, 12, [(20, 0.9)])
    wishes.replace(1, 13, [(11, 0.6), (12, 0.6)])
    assert wanted(wishes) == [11, 12, 20]
    assert order(wishes)[0] == 20  # the deadline moved, too
    wishes.replace(1, 13, [])
    assert wanted(wishes) == [20]


def test_skipped_wishes_are_wanted_but_not_offered_until_a_forecast_changes() -> None:
    wishes = Speculation()
    wishes.replace(1, 11, [(10, 0.5)])
    assert order(wishes) == [10]
    assert not wishes
    assert wishes.most_urgent() is None
    assert wishes.wants(1, 10)
    wishes.replace(2, 12, [(20, 0.5)])
    assert order(wishes) == [10, 20]


def test_dropping_a_layer() -> None:
    wishes = Speculation()
    wishes.drop(1)
    assert wanted(wishes) == []
    wishes.replace(1, 11, [(10, 0.5), (11, 0.7)])
    wishes.drop(1)
    assert wanted(wishes) == []
    assert wishes.most_urgent() is None


def test_falsehood_is_certain() -> None:
    wishes = Speculation()
    assert not wishes
    wishes.replace(1, 11, [(10, 0.5)])
    assert wishes
    wishes.most_urgent()
    assert wishes
    wishes.drop(1)
    assert wishes.most_urgent() is None
    assert not wishes


def test_nothing_to_skip() -> None:
    with pytest.raises(AssertionError, match="nothing to skip"):
        Speculation().skip()
