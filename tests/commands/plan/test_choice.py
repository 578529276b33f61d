from __future__ import annotations

import pytest

from commands.plan.planned import MIB, link, sizes, time_model, times
from promoe.commands.plan.choice import cheapest, choose, rates_to_try
from promoe.commands.plan.sizes import Room
from promoe.commands.plan.time_model import Prediction, Speed

ROOM = Room("RAM", None, 0, 0)


def linear(rate: float) -> Prediction:
    """100 tokens/s for a whole cache."""
    speed = Speed(1.0, 0.01 / rate, rate, 0.0, (1 - rate) * 1e8, "", 0.01, 0.1 * (1 - rate))
    return Prediction(rate, round(100 * rate), round(100 * MIB * rate), (speed,))


def test_rates_are_tried_in_steps_from_the_least_to_the_largest() -> None:
    assert rates_to_try(0.12, 0.27) == [0.12, 0.15, 0.20, 0.25, 0.27]
    assert rates_to_try(0.5, 0.5) == [0.5]
    assert rates_to_try(0.01, 1.0)[-1] == 1.0
    assert rates_to_try(0.01, 0.12) == [0.05, 0.1, 0.12]
    assert rates_to_try(0.01, 0.03) == [0.03]


def test_the_smallest_that_is_fast_enough() -> None:
    rates = rates_to_try(0.01, 1.0)
    for wanted in (0.5, 1.0, 33.0, 50.0, 99.0, 100.0):
        found = cheapest(linear, rates, wanted)
        assert found is not None
        assert found.rate == next(rate for rate in rates if 100 * rate >= wanted - 1e-9)
    assert cheapest(linear, rates, 101.0) is None


def test_a_speed_that_is_wanted() -> None:
    found = choose(linear, rates_to_try(0.01, 1.0), ROOM, lambda rate: "disk", 42.0)
    assert found.reached
    assert found.prediction.rate == 0.45
    assert "smallest that reaches 42.0 tokens/s" in found.reason
    missed = choose(linear, rates_to_try(0.01, 0.6), ROOM, lambda rate: "disk", 99.0)
    assert not missed.reached
    assert missed.prediction.rate == 0.6
    assert "99.0 tokens/s are not reached" in missed.reason


def test_without_one_nothing_larger_than_needed() -> None:
    found = choose(linear, rates_to_try(0.01, 1.0), ROOM, lambda rate: "disk", None)
    assert found.prediction.rate == 0.95, "within a tenth of the largest"
    assert found.reached


@pytest.mark.parametrize(
    ("expert_s", "megabytes_per_s", "rate", "sentence"),
    [
        (0.1, 10_000, 0.5, "Computing limits it"),
        (0.0001, 100, 0.5, "The link limits it"),
        (0.004, 1000, 0.25, "Computing and moving experts share the time"),
    ],
)
def test_what_limits_is_one_sentence(expert_s: float, megabytes_per_s: float, rate: float, sentence: str) -> None:
    found = time_model(over=link(megabytes_per_s), compute=times(0.001, expert_s))
    assert choose(found, [rate], ROOM, lambda rate: "disk (1 GB/s)", None).limit.startswith(sentence)


def test_where_memory_is_what_keeps_the_cache_small() -> None:
    model, found = sizes(), time_model(over=link(100), compute=times(0.001, 0.0001))
    tight = Room("RAM", 2 * 2**30 + 33 * MIB, 0, 0)  # of 64 MiB of experts
    assert "Memory allows no larger one: 1.0 MiB of RAM are left." in choose(found, [0.5], tight, str, None).limit
    assert "Memory" not in choose(found, [0.25], tight, str, None).limit
    assert model.slots_bytes == 64 * MIB
