"""Predictions from ids alone, against tables counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.training.baselines import KINDS, Correlation, Popularity, Previous, Token, used

from .traces import EXPERTS, LAYERS, TOP_K, random_trace, trace_of

# Two layers, four experts, one each. Token 7 uses (0, 1) twice and (2, 3) once, token 9 uses (2, 3).
FIT = trace_of([[[0], [1]], [[2], [3]], [[0], [1]], [[2], [3]]], [7, 7, 7, 9], [2, 2], num_experts=4)


def test_used_is_a_row_of_ones_per_token() -> None:
    np.testing.assert_array_equal(used(FIT, 1), np.eye(4)[[1, 3, 1, 3]])


def test_popularity_is_the_share_of_tokens() -> None:
    scores = Popularity(FIT).scores(FIT, 0, 1)
    np.testing.assert_allclose(scores, [[0.5, 0, 0.5, 0]] * 4)


def test_a_token_uses_what_it_used_before_and_a_new_one_what_is_popular() -> None:
    scores = Token(FIT).scores(trace_of([[[0], [0]]] * 4, [7, 9, 8, 10], [4], num_experts=4), 0, 1)
    assert scores is not None
    ties = np.array([0.5e-3, 0, 0.5e-3, 0])
    np.testing.assert_allclose(scores, np.array([[2, 0, 1, 0], [0, 0, 1, 0], [0] * 4, [0] * 4]) + ties, rtol=1e-6)


def test_previous_does_not_reach_across_prompts() -> None:
    scores = Previous(FIT).scores(FIT, 0, 1)
    assert scores is not None
    assert scores.argmax(axis=1).tolist() == [
        0,
        0,
        0,
        0,
    ]  # rows 0 and 2 begin a prompt: by popularity, of equal ones the first
    assert (scores.max(axis=1) > 0.5).tolist() == [False, True, False, True]


def test_correlation_is_what_followed() -> None:
    kind = Correlation(FIT)
    assert kind.scores(FIT, 0, 1) is None
    np.testing.assert_allclose(kind.scores(FIT, 1, 1), np.eye(4)[[1, 3, 1, 3]])
    other = trace_of([[[1], [0]]], [7], [1], num_experts=4)
    np.testing.assert_allclose(kind.scores(other, 1, 1), np.zeros((1, 4)))  # never seen


@pytest.mark.parametrize(("layer_idx", "lookahead", "source"), [(3, 1, 2), (3, 2, 1), (3, 8, 0), (1, 4, 0)])
def test_correlation_looks_back_so_many_layers_or_to_the_first(layer_idx: int, lookahead: int, source: int) -> None:
    trace = random_trace()
    scores = Correlation(trace).scores(trace, layer_idx, lookahead)
    assert scores is not None
    table = used(trace, source).T @ used(trace, layer_idx)
    table /= np.maximum(used(trace, source).sum(axis=0), 1)[:, None]
    np.testing.assert_allclose(scores, used(trace, source) @ table / TOP_K, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_scores_every_expert_of_every_token(kind: str) -> None:
    trace = random_trace()
    fitted = KINDS[kind](trace)
    for layer_idx in range(1, LAYERS):
        scores = fitted.scores(trace, layer_idx, 1)
        assert scores is not None
        assert scores.shape == (trace.num_tokens, EXPERTS)
        assert np.isfinite(scores).all()
