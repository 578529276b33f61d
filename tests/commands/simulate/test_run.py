"""Whole simulations: counts of small traces to the last byte, policies beside each other, a published figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from promoe.commands.simulate.machine import MACHINES, MODELS, Geometry
from promoe.commands.simulate.options import PolicyName
from promoe.commands.simulate.run import Scenario, TracePass, passes_of, simulate
from promoe.errors import ConfigError
from promoe.training.routing_traces import RoutingTrace

from .traces import EXPERTS, LAYERS, TOP_K, topics

TINY = Geometry("tiny", LAYERS, EXPERTS, TOP_K, expert_parameters=1e6, other_parameters=1e6)
POLICIES: tuple[PolicyName, ...] = ("default", "next_use", "lru", "lfu", "lfru", "static", "belady")


def scenario(policy: PolicyName = "default", cache_rate: float = 0.25, **more: Any) -> Scenario:
    return Scenario(MACHINES["rtx-4090"], TINY, cache_rate, policy, **more)


# Written down once; whatever changes them is to be looked at.
GOLDEN = {
    "default": (3333, 2427, 4854000000, 2411),
    "next_use": (3333, 2427, 4854000000, 2411),
    "lru": (3580, 2180, 4360000000, 2164),
    "lfu": (3414, 2346, 4692000000, 2330),
    "lfru": (3595, 2165, 4330000000, 2149),
    "static": (3449, 2311, 4622000000, 2295),
    "belady": (4419, 1341, 2682000000, 0),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_are_the_same_to_the_byte(policy: PolicyName) -> None:
    found = simulate(scenario(policy), topics())
    hits, misses = (
        round(found[name] * found["tokens"] * factor) for name, factor in (("hit_rate", 12), ("misses_per_token", 1))
    )
    moved, evicted = (round(found[name] * found["tokens"]) for name in ("bytes_per_token", "evictions_per_token"))
    assert (hits, misses, moved, evicted) == GOLDEN[policy]
    assert hits + misses == 480 * LAYERS * TOP_K
    assert moved == misses * 2_000_000


def test_policies_lie_between_nothing_and_the_future() -> None:
    misses = {policy: simulate(scenario(policy, 0.5), topics(prompts=60))["misses_per_token"] for policy in POLICIES}
    assert min(misses, key=lambda policy: misses[policy]) == "belady"
    assert misses["default"] == misses["next_use"] < min(0.97 * misses["lru"], misses["lfu"])
    # No expert is more popular than another here, so that frequency over age is about as good.
    assert misses["default"] < 1.02 * misses["lfru"]


def test_all_slots_are_given_out_shared_or_by_layer() -> None:
    shared, apart = simulate(scenario(), topics(prompts=1)), simulate(scenario("lru"), topics(prompts=1))
    assert shared["slots"] == apart["slots"] == LAYERS * int(0.25 * EXPERTS)
    assert (shared["slots_shared_by_layers"], apart["slots_shared_by_layers"]) == (True, False)


def test_a_cache_of_everything_misses_first_uses_only() -> None:
    trace = topics()
    first_uses = sum(len(np.unique(trace.experts[:, layer])) for layer in range(LAYERS))
    for policy in POLICIES:
        found = simulate(scenario(policy, 1.0), trace)
        assert found["misses_per_token"] * found["tokens"] == pytest.approx(first_uses)


def test_an_oracle_misses_nothing_that_the_link_has_time_for() -> None:
    slow = Geometry("slow", LAYERS, EXPERTS, TOP_K, 1e6, other_parameters=1e9)
    machine = MACHINES["rtx-4090"]
    plain = simulate(Scenario(machine, slow, 0.5), topics())
    told = simulate(Scenario(machine, slow, 0.5, predictor="oracle"), topics())
    assert told["stall_s"] < 0.35 * plain["stall_s"]  # the first layer of a token is not forecast by the one before
    assert told["hit_rate"] > plain["hit_rate"] + 0.6 * (1 - plain["hit_rate"])
    assert told["bound_s"] == pytest.approx(plain["bound_s"], rel=0.02)


@pytest.mark.parametrize("predictor", ["token", "previous", "popularity", "correlation"])
def test_a_forecast_does_not_lower_hits(predictor: str) -> None:
    fit, held_out = topics(prompts=30).split(0.5)
    plain = simulate(scenario(), held_out)
    told = simulate(scenario(predictor=predictor, lookahead=2), held_out, fit)
    assert told["hit_rate"] > plain["hit_rate"] - 0.005
    assert told["predictor"] == predictor


def test_nothing_is_faster_than_its_bound() -> None:
    for policy in POLICIES:
        for cache_rate in (0.2, 0.5, 1.0):
            found = simulate(scenario(policy, cache_rate), topics(prompts=4))
            assert found["tpot_s"] >= found["bound_s"] * (1 - 1e-9)
            assert found["tpot_s"] == pytest.approx(found["compute_s"] + found["stall_s"])
            assert 0 <= found["link_use"] <= 1


def test_tokens_of_a_known_prompt_are_one_pass() -> None:
    whole, apart = (simulate(scenario(), topics(prompts=3, generated=known)) for known in (True, False))
    assert (whole["tokens"], apart["tokens"]) == (90, 120)
    assert apart["ttft_s"] is None
    # All experts that ten tokens use, once each, in place of ten decode steps.
    assert whole["ttft_s"] < 6 * apart["tpot_s"]


def test_sequences_that_are_generated_together_share_experts() -> None:
    trace = topics(prompts=8, generated=True)
    alone, together = (simulate(scenario(batch=batch), trace) for batch in (1, 4))
    assert (alone["sequences_per_pass"], together["sequences_per_pass"]) == (1.0, 4.0)
    assert alone["tokens"] == together["tokens"]
    # A pass serves four tokens and needs fewer than four times the experts; it takes longer than one and less than four.
    assert alone["compute_s"] < together["compute_s"] < 4 * alone["compute_s"]
    assert alone["tpot_s"] < together["tpot_s"] < 4 * alone["tpot_s"]
    assert together["tpot_s"] == pytest.approx(together["compute_s"] + together["stall_s"])
    assert together["tpot_s"] >= together["bound_s"]


@pytest.mark.parametrize("predictor", ["token", "oracle"])
def test_forecasts_of_a_batch_are_of_any_of_its_tokens(predictor: str) -> None:
    fit, held_out = topics(prompts=30).split(0.5)
    plain = simulate(scenario(cache_rate=0.5, batch=3), held_out)
    told = simulate(scenario(cache_rate=0.5, batch=3, predictor=predictor), held_out, fit)
    assert told["hit_rate"] > plain["hit_rate"] - 0.005
    if predictor == "oracle":
        assert told["hit_rate"] > plain["hit_rate"] + 0.25 * (1 - plain["hit_rate"])


def test_static_is_as_good_as_what_it_was_fitted_on() -> None:
    trace = topics(seed=1)
    hindsight = simulate(scenario("static"), trace)["misses_per_token"]
    misled = simulate(scenario("static"), trace, fit=topics(seed=2))["misses_per_token"]
    assert hindsight < misled


def test_the_figure_that_promoe_starts_from() -> None:
    """DeepSeek-MoE-16B, half of its experts cached (LRU), RTX 4090: 67.9 ms per token, 58.1 of it waiting for experts."""
    model, rng = MODELS["deepseek-moe-16b"], np.random.default_rng(0)
    uniform = np.stack([[rng.permutation(64)[:6] for _ in range(27)] for _ in range(300)])
    trace = RoutingTrace(uniform, np.zeros(300, dtype=int), np.array([300]), 64)
    found = simulate(Scenario(MACHINES["rtx-4090"], model, 0.5, "lru"), trace)
    assert found["hit_rate"] == pytest.approx(0.5, abs=0.03)
    assert found["tpot_s"] == pytest.approx(67.9e-3, rel=0.1)
    assert found["stall_s"] == pytest.approx(58.1e-3, rel=0.1)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"policy": "clock"}, "no policy 'clock'.*belady"),
        ({"cache_rate": 0.05}, r"less than one slot.*at least 7%"),
        ({"policy": "belady", "predictor": "token"}, "knows the future"),
        ({"lookahead": 0}, "--lookahead must be at least 1. Got 0 instead"),
        ({"batch": 0}, "--batch must be at least 1. Got 0 instead"),
        ({"batch": 2, "policy": "belady"}, "one sequence at a time"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        scenario(**more)


def test_predictors_that_need_hidden_states_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'gate' needs hidden states.*token, previous"):
        simulate(scenario(predictor="gate"), topics(prompts=1))


def sequences(*lengths: int, prompts: int | None = None) -> RoutingTrace:
    """Sequences of these lengths, of which the first `prompts` tokens were the prompt; None: unknown."""
    count = sum(lengths)
    found = RoutingTrace(np.zeros((count, 1, 1), dtype=np.int16), np.zeros(count, dtype=np.int64), np.array(lengths), 4)
    if prompts is None:
        return found
    return replace(found, generated=np.concatenate([np.arange(length) >= prompts for length in lengths]))


def decode(*rows: int) -> TracePass:
    return TracePass("decode", list(rows))


def test_one_sequence_after_the_other() -> None:
    assert list(passes_of(sequences(2, 1), 1)) == [decode(0), decode(1), decode(2)]


def test_a_prompt_is_one_pass() -> None:
    found = list(passes_of(sequences(4, 3, prompts=2), 1))
    assert found == [TracePass("prefill", [0, 1]), decode(2), decode(3), TracePass("prefill", [4, 5]), decode(6)]


def test_a_sequence_that_ends_makes_room_for_the_next() -> None:
    found = list(passes_of(sequences(3, 1, 2), 2))
    assert found == [decode(0, 3), decode(1, 4), decode(2, 5)]
    found = list(passes_of(sequences(4, 3, 3, prompts=2), 2))
    assert found[:3] == [TracePass("prefill", [0, 1]), TracePass("prefill", [4, 5]), decode(2, 6)]
    assert found[3:] == [TracePass("prefill", [7, 8]), decode(3, 9)]


def test_a_sequence_that_is_only_a_prompt_takes_no_place() -> None:
    found = list(passes_of(sequences(2, 3, prompts=2), 1))
    assert found == [TracePass("prefill", [0, 1]), TracePass("prefill", [2, 3]), decode(4)]


def test_every_token_is_in_one_pass() -> None:
    for batch in (1, 3, 50):
        rows = [row for one in passes_of(sequences(5, 1, 7, 2, 9, prompts=3), batch) for row in one.rows]
        assert sorted(rows) == list(range(24))
