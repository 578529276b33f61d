from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build, token_ids

from promoe.commands.measure import (
    Generation,
    Stopwatch,
    estimate,
    generate,
    paired_estimates,
    paired_speedup,
    tpots_s,
    ttfts_s,
)


def answer(*times_s: float) -> Generation:
    return Generation(tuple(range(len(times_s) + 1)), 0.5, times_s)


def test_tpot_is_the_mean_gap_and_nan_for_a_single_token() -> None:
    assert answer(0.1, 0.2, 0.3).tpot_s == pytest.approx(0.2)
    assert math.isnan(answer().tpot_s)
    assert tpots_s([answer(0.1), answer(0.3)]) == [0.1, 0.3]
    assert ttfts_s([answer(0.1), answer(0.3)]) == [0.5, 0.5]


def test_stopwatch_skips_the_prompt_and_reports_each_token() -> None:
    seen: list[int] = []
    watch = Stopwatch(seen.append)
    watch.put(torch.tensor([[5, 6, 7]]))
    watch.put(torch.tensor([8]))
    watch.put(torch.tensor([9]))
    watch.end()
    assert watch.tokens == seen == [8, 9]
    assert watch.times_s == sorted(watch.times_s)


def test_generate_gives_the_models_own_greedy_tokens() -> None:
    model = build("qwen2_moe")
    ids = token_ids(length=7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    generation = generate(model, inputs, 5)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, 7:].tolist()
    assert list(generation.tokens) == expected
    assert len(generation.gaps_s) == 4
    assert generation.ttft_s > 0
    assert min(generation.gaps_s) > 0


def test_generate_passes_options_on() -> None:
    model = build("qwen2_moe")
    ids = token_ids(length=4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    greedy = generate(model, inputs, 12)
    penalised = generate(model, inputs, 12, repetition_penalty=8.0)
    assert len(set(penalised.tokens)) >= len(set(greedy.tokens))
    assert penalised.tokens != greedy.tokens


def test_estimate_holds_the_median_and_narrows_with_more_values() -> None:
    few = estimate([1.0, 2.0, 9.0])
    assert few.value == 2.0
    assert (few.low, few.high) == (1.0, 9.0)
    many = estimate([1.0, 2.0, 9.0] * 30)
    assert many.value == 2.0
    assert many.high - many.low < few.high - few.low
    assert estimate([3.0]) == (3.0, 3.0, 3.0)
    assert all(math.isnan(value) for value in estimate([]))
    assert estimate([1.0, 5.0, 2.0], seed=1) == estimate([1.0, 5.0, 2.0], seed=1)


def test_paired_speedup_sees_through_differences_between_prompts() -> None:
    slow, fast = [1.0, 10.0, 100.0, 7.0], [0.5, 5.0, 50.0, 3.5]
    assert paired_speedup(slow, fast) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="argument 2"):
        paired_speedup([1.0], [1.0, 2.0])


def test_paired_estimates_leave_out_what_slows_all_systems_alike() -> None:
    found = paired_estimates({"a": [1.0, 10.0, 100.0], "b": [3.0, 30.0, 300.0]})
    assert found["a"] == pytest.approx((10.0, 10.0, 10.0))
    assert found["b"] == pytest.approx((30.0, 30.0, 30.0))
    assert paired_estimates({}) == {}


times = st.lists(st.floats(1e-4, 1e3), min_size=3, max_size=3)


@given(st.dictionaries(st.text(max_size=3), times, min_size=1, max_size=4))
@settings(max_examples=40)
def test_an_interval_is_around_its_median_and_no_time_is_negative(measured: dict[str, list[float]]) -> None:
    for name, (value, low, high) in paired_estimates(measured).items():
        assert value == sorted(measured[name])[1]
        assert 0 < low <= value * (1 + 1e-9)
        assert value <= high * (1 + 1e-9)


def test_one_item_has_intervals_without_width() -> None:
    assert paired_estimates({"a": [2.0], "b": [5.0]}) == {"a": pytest.approx((2, 2, 2)), "b": pytest.approx((5, 5, 5))}
