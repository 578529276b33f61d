"""Answers through the virtual clock: cases worked by hand, in seconds."""

from __future__ import annotations

import math

import pytest

from promoe.commands.simulate.answers import simulate_answers
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.stats.routing import RoutedPass
from promoe.transfer.link_timetable import Wire


def decode(*ids: int) -> RoutedPass:
    return RoutedPass("decode", [(0, [list(ids)])])


def prompt(*tokens: list[int]) -> RoutedPass:
    return RoutedPass("prefill", [(0, list(tokens))])


def config(num_slots: int = 2) -> SchedulerConfig:
    return SchedulerConfig(
        num_experts=[8], chunk_bytes=[(3,)], pools=[PoolSpec(num_slots, (0,))], eviction="lru", prefetch=False
    )


def work(layer_idx: int, num_tokens: int, num_used: int) -> tuple[float, float]:
    """The layer takes ten seconds a token, each of its experts one."""
    return 10.0 * num_tokens, 1.0


def test_the_first_answer_only_fills_the_slots() -> None:
    answers = [[decode(0, 1)], [decode(0, 1), decode(0, 2)], [decode(0, 2)]]
    found = simulate_answers(config(), answers, Wire(1.0, 0.0), work)
    # 12 where both are there; expert 2 comes at 13, while 0 was computed until 11, and is computed until 14.
    assert found.tpot_s == pytest.approx(((12 + 14) / 2 + 12) / 2)
    assert found.stall_s == pytest.approx(2 / 3)
    assert found.hit_rate == pytest.approx(5 / 6)
    assert found.bytes_per_token == pytest.approx(3 / 3)
    assert math.isnan(found.ttft_s)


def test_a_single_answer_counts_itself() -> None:
    found = simulate_answers(config(), [[prompt([0], [1]), decode(0, 1)]], Wire(1.0, 0.0), work)
    # The prompt: 20, then 0 comes at 23 and 1 at 26, each computed for 1.
    assert found.ttft_s == 27.0
    assert found.tpot_s == 12.0
    assert found.hit_rate == 1.0


def test_prompts_are_told_apart_from_tokens() -> None:
    answers = [[prompt([5], [6]), decode(5, 6)], [prompt([5], [6]), decode(5, 6)]]
    found = simulate_answers(config(), answers, Wire(1.0, 0.0), work)
    assert (found.ttft_s, found.tpot_s) == (22.0, 12.0)
