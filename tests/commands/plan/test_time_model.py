from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from commands.plan.planned import HABIT, link, sizes, time_model, times
from promoe.commands.plan.routing import made_up
from promoe.commands.plan.time_model import Curve, TimeModel


def test_with_every_expert_in_memory_a_token_takes_what_computing_takes() -> None:
    found = time_model()(1.0).slowest
    assert found.compute_s == pytest.approx(2 * (0.002 + 2 * 0.001))
    assert found.tpot_s == pytest.approx(found.compute_s)
    assert (found.hit_rate, found.bytes_per_token, found.stall_s) == (1.0, 0.0, 0.0)
    assert found.tokens_per_s == pytest.approx(1 / found.compute_s)


def test_a_prompt_takes_its_rows() -> None:
    model = sizes()
    found = time_model(model)(1.0).slowest
    expected_s = []
    for prompt, *_ in made_up(model, HABIT, 16, 12).answers[1:]:
        used = [len({idx for token in tokens for idx in token}) for _, tokens in prompt.visits]
        expected_s.append(sum(times().layer(16) + count * times().expert(16 * 2 / count) for count in used))
    assert found.ttft_s == pytest.approx(median(expected_s))


def test_what_is_missed_is_moved_and_waited_for() -> None:
    model = sizes()
    found = time_model(model)
    small, large = found(0.25).slowest, found(0.75).slowest
    assert small.hit_rate < large.hit_rate
    assert small.bytes_per_token == pytest.approx((1 - small.hit_rate) * model.token_bytes)
    assert small.transfer_s == pytest.approx(small.bytes_per_token / 1e9)
    assert small.tpot_s > large.tpot_s > small.compute_s
    assert small.tpot_s == pytest.approx(small.compute_s + small.stall_s, rel=1e-6), "nothing else costs time"
    assert (found(0.25).slots, found(0.25).slots_bytes) == (4, 4 * 4 * 2**20)


def test_what_computing_and_reading_lose_to_each_other_counts() -> None:
    slow = times(0.02, 0.01)
    plain, slowed = time_model(compute=slow)(0.25).slowest, time_model(None, link(slowdown=3.0), slow)(0.25).slowest
    assert slowed.tpot_s > plain.tpot_s
    grouped = time_model(compute=times(0.02, 0.01, group_s=0.01))(0.25).slowest
    assert grouped.tpot_s > plain.tpot_s


def test_quantised_experts_are_moved_as_they_are_stored_and_then_dequantised() -> None:
    model = sizes()
    quarter = replace(model, layers=tuple(replace(one, stored_bytes=one.stored_bytes // 4) for one in model.layers))
    as_stored = time_model(quarter)(0.25).slowest
    assert as_stored.transfer_s == pytest.approx(as_stored.bytes_per_token / 4e9)
    # Two workers share what dequantising takes: half of it per expert.
    converted = time_model(quarter, link(convert_s=0.004))(0.25).slowest
    missed = converted.bytes_per_token / model.layers[0].layout.slot_bytes
    assert converted.transfer_s == pytest.approx(converted.bytes_per_token / 4e9 + missed * 0.002)


def test_kinds_of_routing_make_a_range_slowest_first() -> None:
    model = sizes(layers=3, experts=16)
    habits = [replace(HABIT, name=str(recency), recency=recency) for recency in (8.0, 0.0)]
    routings = [made_up(model, habit, 16, 24) for habit in habits]
    found = TimeModel(model, times(), lambda rate: link(), routings)(0.25)
    assert [speed.routing for speed in found.speeds] == ["0.0", "8.0"]
    assert found.slowest.tpot_s > found.speeds[-1].tpot_s


def test_of_two_measurements_the_shorter_times() -> None:
    one, other = Curve(((1, 2.0), (10, 5.0))), Curve(((1, 1.0), (11, 6.0)))
    assert one.quicker(other).points == ((1, 1.0), (10, 5.0))
    found = times(0.002, 0.003, 0.1).quicker(times(0.001, 0.004, 0.2))
    assert (found.layer(1), found.expert(1), found.group_s) == (0.001, 0.003, 0.1)


def test_between_points_on_a_line_and_beyond_the_last_too() -> None:
    curve = Curve(((1, 2.0), (11, 4.0)))
    assert curve(1) == 2.0
    assert curve(0.5) == 2.0, "fewer rows read the same weights"
    assert curve(6) == 3.0
    assert curve(21) == pytest.approx(6.0)
    assert Curve(((1, 2.0),))(50) == 2.0
    assert Curve(((1, 2.0), (11, 1.0)))(21) == 1.0, "noise does not make more rows cheaper still"
