"""Accuracy and misses, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.training.evaluation import UnknownKindError, evaluate, replay_caches, top
from promoe.training.tables import KINDS

from .traces import EXPERTS, LAYERS, random_trace, trace_of


def test_top_takes_the_largest_and_of_equal_ones_the_lower_ids() -> None:
    scores = np.array([[0.1, 0.5, 0.2, 0.4], [1.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    assert top(scores, 2).tolist() == [[False, True, False, True], [True, True, False, False]]


def test_a_kind_that_knows_is_always_right_and_one_that_guesses_is_not() -> None:
    """In this trace the token decides the first layer, and each layer the next."""
    fit, held_out = random_trace(prompts=40).split()
    result = evaluate(fit, held_out, list(KINDS), [1, 2], {})
    for lookahead in ("1", "2"):
        assert result["token"][lookahead]["accuracy"] == 1.0
        assert result["token"][lookahead]["misses"] == {}
        assert 0.1 < result["popularity"][lookahead]["accuracy"] < 0.8
    assert result["correlation"]["1"]["layers"][0] is None
    assert result["correlation"]["1"]["accuracy"] == pytest.approx(np.mean(result["correlation"]["1"]["layers"][1:]))
    assert result["correlation"]["1"]["accuracy"] > result["previous"]["1"]["accuracy"]


def test_misses_are_counted_by_hand() -> None:
    """One layer, one expert per token, one slot: absent is whatever the token before did not use."""
    fit = trace_of([[[0]], [[1]], [[0]], [[2]]], [5, 6, 5, 7], [2, 2], num_experts=4)
    held_out = trace_of([[[0]], [[0]], [[1]], [[3]]], [5, 5, 6, 7], [4], num_experts=4)
    caches = replay_caches(held_out, ["lru"], [0.25])
    held = caches["lru", 0.25]
    assert held.shape == (4, 1, 4)
    assert [np.flatnonzero(row).tolist() for row in held[:, 0]] == [[], [0], [0], [1]]
    # Predicted by token: 0, 0, 1, 2. Needed and absent: 0, -, 1, 3. Predicted and absent: 0, -, 1, 2.
    figures = evaluate(fit, held_out, ["token"], [1], caches)["token"]["1"]
    assert figures["accuracy"] == 0.75
    assert figures["misses"] == {"lru": {"25%": {"recall": pytest.approx(2 / 3), "precision": pytest.approx(2 / 3)}}}


def test_misses_are_of_the_first_tokens_if_only_these_were_replayed() -> None:
    trace = random_trace(prompts=40)
    fit, held_out = trace.split()
    caches = replay_caches(held_out, ["next_use"], [0.5])
    part = {key: held[:10] for key, held in caches.items()}
    assert evaluate(fit, held_out, ["previous"], [1], part) != evaluate(fit, held_out, ["previous"], [1], caches)


def test_a_cache_of_everything_has_no_misses_but_the_first() -> None:
    trace = random_trace()
    (held,) = replay_caches(trace, ["lru"], [1.0]).values()
    for layer_idx in range(LAYERS):
        seen = np.cumsum(np.eye(EXPERTS)[trace.experts[:, layer_idx]].sum(axis=1), axis=0) > 0
        np.testing.assert_array_equal(held[1:, layer_idx], seen[:-1])


def test_where_nothing_is_predicted_there_are_no_figures() -> None:
    trace = trace_of([[[0]], [[1]]], [0, 1], [1, 1], num_experts=2)
    figures = evaluate(trace, trace, ["correlation"], [1], replay_caches(trace, ["lru"], [0.5]))["correlation"]["1"]
    assert figures == {
        "accuracy": None, "layers": [None], "misses": {"lru": {"50%": {"recall": None, "precision": None}}}
    }  # fmt: skip


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownKindError, match=r"no kind 'gate' that predicts from a trace of ids.*token, previous"):
        evaluate(random_trace(), random_trace(), ["token", "gate"], [1], {})
