from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from commands.plan.planned import HABIT, sizes
from commands.simulate.traces import EXPERTS, LAYERS, TOP_K, topics
from promoe.commands.plan.routing import OFTEN, SELDOM, WARM_UP_TOKENS, Habit, Routing, from_trace, made_up
from promoe.errors import ConfigError


def repeated(routing: Routing) -> float:
    """Share of a token's experts that the token before used too."""
    shares = []
    for passes in routing.answers:
        tokens = [[set(chosen[0]) for _, chosen in one.visits] for one in passes[1:]]
        shares += [len(a & b) / len(b) for x, y in itertools.pairwise(tokens) for a, b in zip(x, y, strict=True)]
    return float(np.mean(shares))


def test_made_up_answers_have_the_shape_of_the_model() -> None:
    model = sizes(layers=3, experts=8, top_k=2)
    model = replace(model, layers=(*model.layers[:2], replace(model.layers[2], num_experts=5, top_k=3)))
    routing = made_up(model, HABIT, 10, 20, answers=2)
    assert routing == made_up(model, HABIT, 10, 20, answers=2)
    assert [len(passes) for passes in routing.answers] == [1 + WARM_UP_TOKENS, 21, 21]
    for passes in routing.answers:
        assert [one.phase for one in passes] == ["prefill", *["decode"] * (len(passes) - 1)]
        for one in passes:
            for (layer_idx, tokens), layer in zip(one.visits, model.layers, strict=True):
                assert len(tokens) == (10 if one.phase == "prefill" else 1)
                for ids in tokens:
                    assert len(set(ids)) == len(ids) == layer.top_k, layer_idx
                    assert set(ids) <= set(range(layer.num_experts))


def test_habits_differ_in_how_much_they_repeat() -> None:
    model = sizes(layers=4, experts=32, top_k=4)
    never = Habit("", "", 0.0, 0.0)
    shares = [repeated(made_up(model, habit, 16, 60)) for habit in (never, SELDOM, OFTEN)]
    assert shares[0] == pytest.approx(4 / 32, abs=0.03)
    assert shares[0] < shares[1] - 0.05 < shares[2] - 0.1


def test_a_trace_gives_its_own_routing() -> None:
    trace = topics(prompts=6, length=40, generated=True)  # of each, 10 tokens are a prompt
    model = sizes(LAYERS, EXPERTS, TOP_K)
    routing = from_trace(trace, model, "it", 256, 20, answers=4)
    assert len(routing.answers) == 5
    prompt, first, *_ = routing.answers[1]
    assert prompt.visits[2] == (2, trace.experts[40:50, 2].tolist())
    assert first.visits[2] == (2, [trace.experts[50, 2].tolist()])
    assert [len(passes) for passes in routing.answers] == [21] * 5
    assert "80 tokens of 4 prompts of it" in routing.assumed
    cut = from_trace(replace(trace, generated=None), model, "it", 12, 100)
    assert [len(passes[0].visits[0][1]) for passes in cut.answers] == [12] * 5
    assert [len(passes) for passes in cut.answers] == [1 + 28] * 5


def test_a_trace_of_another_model() -> None:
    with pytest.raises(
        ConfigError, match=f"{LAYERS} MoE layers of {EXPERTS} experts, top {TOP_K}, but model has 2 of 8, top 2"
    ):
        from_trace(topics(), sizes(2, 8, 2), "it", 8, 8)
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        from_trace(topics(prompts=1), sizes(LAYERS, EXPERTS, TOP_K), "it", 8, 8)
