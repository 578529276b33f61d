"""Prompts of given lengths, and three ways to answer them that give the same tokens."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build

from promoe.commands.bench.many import LENGTHS, Many, answer_many, lengths
from promoe.errors import ConfigError


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_those_of_published_evaluations(name: str) -> None:
    wanted, most = LENGTHS[name]
    found = lengths(name, 256)
    assert max(found) <= most
    assert 0.6 * wanted < mean(found) <= 1.01 * wanted
    assert found[:8] != sorted(found[:8])
    assert found == lengths(name, 256)


@given(mean_tokens=st.integers(1, 200), more=st.integers(0, 500), count=st.integers(1, 50))
def test_any_lengths(mean_tokens: int, more: int, count: int) -> None:
    found = lengths(f"{mean_tokens}:{mean_tokens + more}", count)
    assert len(found) == count
    assert min(found) >= 1
    assert max(found) <= mean_tokens + more


@pytest.mark.parametrize("name", ["mt", "10", "20:10", "0:5", "a:b", "1:2:3"])
def test_lengths_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="MEAN:MOST"):
        lengths(name, 4)


def test_all_ways_give_the_same_tokens_of_the_same_number() -> None:
    model = build("qwen2_moe", dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    prompts = [[1 + (number * token) % 50 for token in range(1, 4 + 3 * number)] for number in range(5)]
    ways = [Many(prompts, 6, "alone"), Many(prompts, 6, "padded", 2), Many(prompts, 6, "together", 3)]
    found = [answer_many(model, many, 0) for many in ways]
    assert found[0].tokens == found[1].tokens == found[2].tokens
    assert {len(tokens) for tokens in found[0].tokens} == {6}
    for one in found:
        assert 0 < one.waited_s <= one.took_s
        assert one.tokens_per_s == pytest.approx(30 / one.took_s)
    assert model.generation_config.eos_token_id == ends


def test_the_kv_cache_has_room_for_the_longest() -> None:
    many = Many([[1] * 30, [1] * 31, [1] * 90], 2, "together", 2)
    assert many.kv_tokens == 96 + 64
