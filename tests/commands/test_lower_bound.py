from __future__ import annotations

import math

import torch
from tiny_models import build, token_ids

import promoe
from promoe.commands.lower_bound import (
    link_bandwidth,
    missed_by_answer,
    missed_bytes,
    needed_share,
)
from promoe.commands.measure import generate
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.stats.counts import PhaseStats
from promoe.stats.routing import RoutedPass, RoutingRecorder


def config(num_slots: int, *, layers: int = 1, experts: int = 4, eviction: str = "lru") -> SchedulerConfig:
    """Experts of 10 bytes in chunks of 4 and 6."""
    return SchedulerConfig(
        num_experts=[experts] * layers,
        chunk_bytes=[(4, 6)] * layers,
        pools=[PoolSpec(num_slots, tuple(range(layers)))],
        eviction=eviction,  # type: ignore[arg-type]
        reorder=False,
        strict=True,
    )


def decode(*ids: int, layer: int = 0) -> RoutedPass:
    return RoutedPass("decode", [(layer, [list(ids)])])


def test_lru_misses_of_a_hand_made_routing() -> None:
    passes = [decode(0, 1), decode(0, 2), decode(1, 2), decode(0, 2), decode(0, 2)]
    # Two slots: {0,1}; 0 stays, 2 replaces 1; 2 stays, 1 replaces 0; 2 stays, 0 replaces 1; both are there.
    assert missed_bytes(config(2), passes) == [20, 10, 10, 10, 0]
    assert missed_bytes(config(4), passes) == [20, 10, 0, 0, 0]


def test_a_layers_experts_are_one_event() -> None:
    # One by one in id order, fetching 0 would evict 1 (used longest ago), which the same event still needs.
    passes = [decode(1), decode(2), decode(0, 1)]
    assert missed_bytes(config(2), passes) == [10, 10, 10]


def test_more_experts_than_slots_run_in_waves() -> None:
    assert missed_bytes(config(1), [decode(0, 1, 2), decode(0, 1, 2)]) == [30, 20]
    assert missed_bytes(config(2), [RoutedPass("prefill", [(0, [[0, 1], [2, 3], [1, 3]])])]) == [40]


def test_policies_are_replayed_not_only_lru() -> None:
    # Expert 3 is popular; 0, 1 and 2 pass by once each. Next use keeps 3, LRU gives it up.
    passes = [*[decode(3)] * 6, decode(0), decode(1), decode(2), decode(3)]
    assert sum(missed_bytes(config(2), passes)) == 10 * 5
    assert sum(missed_bytes(config(2, eviction="next_use"), passes)) == 10 * 4


def test_layers_share_a_pool() -> None:
    passes = [RoutedPass("decode", [(0, [[0]]), (1, [[0]])])] * 2
    assert missed_bytes(config(2, layers=2), passes) == [20, 0]
    assert missed_bytes(config(1, layers=2), passes) == [20, 20]


def test_bytes_per_token_is_the_mean_over_decode_passes_of_each_generation() -> None:
    prompt = RoutedPass("prefill", [(0, [[0, 1], [0, 1]])])
    generations = [[prompt, decode(0, 1), decode(2, 3)], [decode(2, 3), decode(2, 3)], [prompt]]
    assert [missed.prompt_bytes for missed in missed_by_answer(config(2), generations)] == [20, 0, 20]
    first, second, third = (missed.token_bytes for missed in missed_by_answer(config(2), generations))
    assert first == 10.0  # 0 and 20 bytes; the prompt's own 20 are not decoding's
    assert second == 0.0  # slots stay filled
    assert third != third


def test_recorded_routing_is_what_a_patched_model_fetches() -> None:
    """On a real model: the replay of LRU in order equals what the engine moved on demand, pass by pass."""
    ids = token_ids(length=6)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = build("qwen2_moe", num_experts=8, top_k=2)
    with RoutingRecorder(model, promoe.find_moe_layers(model)) as recorder:
        answer = generate(model, inputs, 8)
        passes = recorder.take()
        assert recorder.take() == []
    assert [routed.phase for routed in passes] == ["prefill", *["decode"] * 7]
    assert all([layer for layer, _ in routed.visits] == [0, 1, 2] for routed in passes)
    assert all(len(tokens) == 6 for _, tokens in passes[0].visits)
    assert not any(module._forward_hooks for module in model.modules()), "hooks are taken away"

    settings = promoe.PromoeConfig(eviction="lru", ablation=promoe.Ablation(early_preemption=False))
    promoe.patch(model, cache="40%", predictor=None, link=promoe.EmulatedLink(1e12), config=settings)
    try:
        assert generate(model, inputs, 8).tokens == answer.tokens
        stats, engine = model.promoe.stats(), model.promoe.runtime.engine
        missed = missed_bytes(engine.scheduler.config, passes)
        assert (missed[0], sum(missed[1:])) == (stats.prefill.bytes_demand, stats.decode.bytes_demand)
        assert link_bandwidth(engine.link, engine.store) == 1e12
    finally:
        promoe.unpatch(model)


def test_a_system_needs_what_it_moved_and_used_where_that_is_less_than_its_policy_misses() -> None:
    decode = PhaseStats(tokens=10, bytes_demand=600, bytes_prefetched=300, bytes_wasted=100)
    assert needed_share([40.0, 60.0], decode) == 1.0
    assert needed_share([80.0, 120.0, math.nan], decode) == 0.8
    assert needed_share([100.0], PhaseStats()) == 1.0, "nothing was decoded"
