"""Whole runs of generated routing: what policies and predictions cost and save, in bytes, hits and stall."""

from __future__ import annotations

from functools import cache

import pytest

from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.fetch_queue import LEAST_SPAN_EXPERTS

from .simulated import (
    Forecaster,
    Probabilities,
    Replay,
    Routing,
    exact,
    global_pool,
    good,
    hostile,
    markov_routing,
    noise,
    oracle,
    topic_routing,
)

NUM_TOKENS = 250
ROUTINGS = ("markov", "topic")
RATES = (0.25, 0.5)


@cache
def routing(name: str) -> Routing:
    make = {"markov": markov_routing, "topic": topic_routing}[name]
    return make(1, NUM_TOKENS, num_layers=4)


@cache
def without_forecasts(name: str, cache_rate: float) -> Replay:
    return Replay(routing(name), global_pool(routing(name), cache_rate)).run()


def with_forecasts(name: str, cache_rate: float, forecaster: Forecaster, **switches: object) -> Replay:
    return Replay(routing(name), global_pool(routing(name), cache_rate, **switches), forecaster).run()


every_run = pytest.mark.parametrize(("name", "cache_rate"), [(n, r) for n in ROUTINGS for r in RATES])


# -- predictions ----------------------------------------------------------------------------------------------------


SEEDS = (1, 2, 3)


@cache
def moved_by_token(seed: int, wrong: str | None, cache_rate: float) -> tuple[Replay, list[int]]:
    """Return a long run, and the bytes moved up to each of its tokens."""
    long = markov_routing(seed, 600, num_layers=4)
    forecaster = {
        None: None,
        "noise": noise(long, 5),
        "certain noise": noise(long, 5, top_k=4),
        "hostile": hostile(long, 7),
    }[wrong]
    run, moved = Replay(long, global_pool(long, cache_rate), forecaster), []
    for token in range(long.num_tokens):
        for layer_idx in range(long.num_layers):
            run.step(token, layer_idx)
        moved.append(run.tally.moved_bytes)
    return run, moved


def total_after(wrong: str | None, cache_rate: float, token: int) -> int:
    """Return the bytes moved after a token, in all of the long runs."""
    moved = [moved_by_token(seed, wrong, cache_rate)[1] for seed in SEEDS]
    return sum(run[-1] - run[token] for run in moved)


@pytest.mark.parametrize("cache_rate", RATES)
@pytest.mark.parametrize("wrong", ["noise", "certain noise", "hostile"])
def test_wrong_predictions_cost_at_most_five_percent_and_only_at_first(wrong: str, cache_rate: float) -> None:
    for seed in SEEDS:
        run, moved = moved_by_token(seed, wrong, cache_rate)
        plain, plain_moved = moved_by_token(seed, None, cache_rate)
        assert run.tally.moved["prefetch"] > 0  # the predictor was heard before it was found out
        assert moved[-1] <= 1.05 * plain_moved[-1]
        assert run.hit_rate >= plain.hit_rate - 0.001
        assert run.waited <= 1.01 * plain.waited
    # Which of two victims goes is a coin toss then, so one run alone may be some tenths of a percent better or worse.
    assert total_after(wrong, cache_rate, 50) <= 1.005 * total_after(None, cache_rate, 50)


def test_taken_at_their_word_wrong_predictions_cost_a_lot() -> None:
    """Calibration is there for this."""
    run = with_forecasts("markov", 0.5, hostile(routing("markov"), 7), calibrate=False)
    assert run.tally.moved_bytes > 1.5 * without_forecasts("markov", 0.5).tally.moved_bytes


@every_run
def test_an_oracle_helps(name: str, cache_rate: float) -> None:
    run, plain = with_forecasts(name, cache_rate, oracle(routing(name))), without_forecasts(name, cache_rate)
    assert run.hit_rate > plain.hit_rate + 0.4 * (1 - plain.hit_rate)
    assert run.ready_rate > plain.ready_rate + 0.4 * (1 - plain.ready_rate)
    assert run.waited < 0.6 * plain.waited
    assert run.tally.moved_bytes < 1.05 * plain.tally.moved_bytes
    # Whatever was sent early was sent for the visit that needed it.
    assert run.tally.wasted_bytes["prefetch"] < 0.02 * run.tally.moved["prefetch"]


@pytest.mark.parametrize(("name", "cache_rate", "calibrate"), [("markov", 0.25, True), ("topic", 0.5, False)])
def test_a_good_predictor_does_not_lower_hits(name: str, cache_rate: float, calibrate: bool) -> None:
    forecaster = good(routing(name), 3)
    run, plain = with_forecasts(name, cache_rate, forecaster, calibrate=calibrate), without_forecasts(name, cache_rate)
    assert run.hit_rate > plain.hit_rate
    assert run.waited < plain.waited


@pytest.mark.parametrize("cache_rate", RATES)
@pytest.mark.parametrize("calibrate", [True, False])
def test_exact_probabilities_do_not_lower_hits(cache_rate: float, calibrate: bool) -> None:
    plain = without_forecasts("topic", cache_rate)
    run = with_forecasts("topic", cache_rate, exact(routing("topic")), calibrate=calibrate)
    assert run.hit_rate > plain.hit_rate
    assert run.waited < plain.waited
    # Eviction alone gains from them, too.
    evicting = with_forecasts("topic", cache_rate, exact(routing("topic")), calibrate=calibrate, prefetch=False)
    assert evicting.hit_rate >= plain.hit_rate
    assert evicting.tally.moved_bytes <= plain.tally.moved_bytes


def of_the_prior(run: Replay) -> Forecaster:
    def forecast(token: int, layer_idx: int) -> Probabilities:
        return run.scheduler._prior.probability(layer_idx)

    return forecast


@every_run
def test_a_forecast_equal_to_the_reuse_prior_changes_nothing(name: str, cache_rate: float) -> None:
    config = global_pool(routing(name), cache_rate, calibrate=False, prefetch=False)
    plain, run = Replay(routing(name), config), Replay(routing(name), config)
    run.forecaster = of_the_prior(run)
    for token in range(NUM_TOKENS // 2):
        for layer_idx in range(run.routing.num_layers):
            plain.step(token, layer_idx)
            run.step(token, layer_idx)
            assert run.scheduler.resident() == plain.scheduler.resident(), (token, layer_idx)
    assert run.tally.evictions == plain.tally.evictions > 0


@every_run
def test_wrong_predictions_waste_no_more_than_their_budget(name: str, cache_rate: float) -> None:
    """Half of the experts predicted with 90% are wrong, and the forecasts are not calibrated."""
    runs = {
        share: with_forecasts(name, cache_rate, good(routing(name), 5, 0.5), calibrate=False, waste_share=share)
        for share in (0.025, 1.0)
    }
    wasted = {share: run.tally.wasted_bytes["prefetch"] for share, run in runs.items()}
    moved = runs[0.025].tally.moved_bytes
    expert_bytes, num_slots = 300, runs[0.025].config.pools[0].num_slots
    at_once = expert_bytes * (LEAST_SPAN_EXPERTS + num_slots)  # what is owed, and what fits into slots before it shows
    assert wasted[0.025] <= 0.025 * moved + at_once
    assert wasted[1.0] > 2 * wasted[0.025]


def test_with_prefetch_off_nothing_is_moved_for_a_forecast() -> None:
    run = with_forecasts("markov", 0.25, oracle(routing("markov")), prefetch=False)
    assert run.tally.moved["prefetch"] == run.tally.used == 0
    assert run.tally.moved["demand"] == run.tally.moved_bytes > 0
    assert with_forecasts("markov", 0.25, oracle(routing("markov"))).tally.moved["prefetch"] > 0


def test_every_prefetched_byte_is_used_wasted_or_pending() -> None:
    run = with_forecasts("markov", 0.25, good(routing("markov"), 3))
    pending = run.scheduler._fetched.pending_bytes()
    assert run.tally.used + run.tally.wasted_bytes["prefetch"] + pending == run.tally.moved["prefetch"]
    assert run.tally.used > run.tally.wasted_bytes["prefetch"] > 0


# -- eviction -------------------------------------------------------------------------------------------------------


# Not with (0.15, 0.4): there the last token's experts alone fill the cache, and LRU is as good.
@pytest.mark.parametrize(
    ("cache_rate", "persistence"),
    [(0.15, 0.0), (0.25, 0.0), (0.5, 0.0), (0.15, 0.2), (0.25, 0.2), (0.5, 0.2), (0.25, 0.4), (0.5, 0.4)],
)
def test_next_use_beats_lru_where_experts_differ_in_popularity(cache_rate: float, persistence: float) -> None:
    popular = markov_routing(1, 200, num_layers=4, persistence=persistence)
    moved = {
        eviction: Replay(popular, global_pool(popular, cache_rate, eviction=eviction)).run().tally.moved_bytes
        for eviction in ("lru", "next_use")
    }
    assert moved["next_use"] < 0.97 * moved["lru"], moved


def passes_over_all(num_passes: int, num_layers: int, num_experts: int = 16) -> Routing:
    """Return prompts so long that every expert of every layer is used."""
    return Routing(num_experts, [[list(range(num_experts)) for _ in range(num_layers)] for _ in range(num_passes)])


def test_next_use_keeps_part_of_a_model_through_passes_over_all_of_it() -> None:
    """The layer just finished is the furthest from its next use; LRU drops the one that comes next."""
    prompts = passes_over_all(6, num_layers=4)
    hits = {
        eviction: Replay(prompts, global_pool(prompts, 0.5, eviction=eviction)).run().hits
        for eviction in ("lru", "next_use")
    }
    assert hits["lru"] == 0
    # A quarter of the experts at least, in every pass but the first.
    assert hits["next_use"] >= 5 * 16, hits


@pytest.mark.parametrize("reorder", [False, True])
def test_a_prompt_larger_than_the_pool_thrashes_in_id_order_only(reorder: bool) -> None:
    num_passes, num_experts, num_slots = 5, 16, 8
    prompts = passes_over_all(num_passes, num_layers=2, num_experts=num_experts)
    config = SchedulerConfig(
        num_experts=[num_experts] * 2,
        chunk_bytes=[(100,)] * 2,
        pools=[PoolSpec(num_slots, (0,)), PoolSpec(num_slots, (1,))],
        eviction="lru",
        reorder=reorder,
        strict=True,
    )
    run = Replay(prompts, config, chunks_per_step=0).run()
    # Twice the slots: with what is there first, half of every pass but the first needs no transfer.
    needed = 2 * num_experts * num_passes
    spared = 2 * num_slots * (num_passes - 1) if reorder else 0
    assert run.tally.moved_bytes == 100 * (needed - spared)


# -- order ----------------------------------------------------------------------------------------------------------


@every_run
def test_reordering_has_more_ready_at_once(name: str, cache_rate: float) -> None:
    in_id_order = Replay(routing(name), global_pool(routing(name), cache_rate, reorder=False)).run()
    assert without_forecasts(name, cache_rate).ready_rate > in_id_order.ready_rate


@every_run
def test_early_preemption_lowers_waiting(name: str, cache_rate: float) -> None:
    """Once the gate has chosen, the link fetches what is certainly needed instead of what was forecast."""
    waited = {}
    for hints in (True, False):
        config = global_pool(routing(name), cache_rate, hints=hints)
        run = Replay(routing(name), config, good(routing(name), 3), chunks_per_step=3, gate_lead=1).run()
        waited[hints] = run.waited
    assert waited[True] < 0.97 * waited[False], waited


def test_early_preemption_alone_starts_the_same_transfers_earlier() -> None:
    runs = [
        Replay(routing("markov"), global_pool(routing("markov"), 0.25, hints=hints), gate_lead=2).run()
        for hints in (True, False)
    ]
    assert runs[0].waited < runs[1].waited
    # Not to the byte: a victim chosen at the gate is chosen before the prior has learned from the visit.
    assert runs[0].tally.moved_bytes == pytest.approx(runs[1].tally.moved_bytes, rel=0.03)


def test_a_replay_repeats_exactly() -> None:
    few = markov_routing(4, 60, num_layers=4)
    runs = [Replay(few, global_pool(few, 0.25), good(few, 3)).run() for _ in range(2)]
    assert runs[0].tally.moved == runs[1].tally.moved
    assert runs[0].waited == runs[1].waited
    assert runs[0].scheduler.resident() == runs[1].scheduler.resident()
