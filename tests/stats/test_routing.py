from __future__ import annotations

import torch
from tiny_models import build, token_ids

import promoe
from promoe.commands.measure import generate
from promoe.stats.routing import RoutingRecorder


def test_each_pass_is_recorded_with_the_experts_of_its_tokens_and_hooks_are_taken_away() -> None:
    ids = token_ids(length=6)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = build("qwen2_moe", num_experts=8, top_k=2)
    with RoutingRecorder(model, promoe.find_moe_layers(model)) as recorder:
        generate(model, inputs, 4)
        passes = recorder.take()
        assert recorder.take() == []
    assert [routed.phase for routed in passes] == ["prefill", *["decode"] * 3]
    assert all([layer for layer, _ in routed.visits] == [0, 1, 2] for routed in passes)
    assert all(len(tokens) == 6 for _, tokens in passes[0].visits)
    assert all(len(set(chosen)) == 2 for routed in passes for _, tokens in routed.visits for chosen in tokens)
    assert not any(module._forward_hooks for module in model.modules())
    assert not model._forward_pre_hooks


def test_an_aborted_context_takes_its_hooks_away() -> None:
    model = build("qwen2_moe", num_experts=8, top_k=2)
    try:
        with RoutingRecorder(model, promoe.find_moe_layers(model)):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
