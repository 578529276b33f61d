from __future__ import annotations

import numpy as np
import pytest
import torch
from served import PROMPTS, expected, greedy, served

from predictors.test_history import context, said, visit
from promoe.predictors.correlation import CorrelationPredictor


def test_it_starts_with_a_guess() -> None:
    predictor = CorrelationPredictor(context(3), 2)
    assert said(predictor.predict(visit(0, [0, 1]))) == {(1, 1): pytest.approx([0.5] * 4)}
    # Two tokens: an expert is used unless neither uses it.
    assert said(predictor.predict(visit(1, [0, 1], [2, 3]))) == {(1, 2): pytest.approx([0.75] * 4)}


def test_it_learns_what_follows_what_within_a_token() -> None:
    predictor = CorrelationPredictor(context(2), 1)
    for number in range(20):
        predictor.predict(visit(0, [0, 1], pass_idx=number))
        predictor.predict(visit(1, [2, 3], pass_idx=number))
        predictor.predict(visit(0, [2, 3], pass_idx=100 + number))
        predictor.predict(visit(1, [0, 1], pass_idx=100 + number))
    (used,) = said(predictor.predict(visit(0, [0, 1], pass_idx=999))).values()
    assert used == pytest.approx([0.5 / 21, 0.5 / 21, 20.5 / 21, 20.5 / 21])
    # One expert of each kind: both pasts count.
    (used,) = said(predictor.predict(visit(0, [0, 2], pass_idx=1001))).values()
    assert used == pytest.approx([0.5] * 4)


def test_the_next_tokens_first_layer_follows_the_last() -> None:
    predictor = CorrelationPredictor(context(2), 1)
    for number in range(1, 11):
        predictor.predict(visit(0, [1, 2], pass_idx=number))
        predictor.predict(visit(1, [0, 3], pass_idx=number))
    (used,) = said(predictor.predict(visit(1, [0, 3], pass_idx=11))).values()
    assert used == pytest.approx([0.5 / 10, 9.5 / 10, 9.5 / 10, 0.5 / 10])


def test_visits_that_do_not_follow_each_other_teach_nothing() -> None:
    predictor = CorrelationPredictor(context(3), 1)
    before = [uses.copy() for uses in predictor._uses]
    predictor.predict(visit(0, [0, 1], pass_idx=1))
    predictor.predict(visit(2, [2, 3], pass_idx=1))  # a layer is left out
    predictor.predict(visit(0, [2, 3], pass_idx=5))  # a pass is
    predictor.predict(visit(1, [2, 3], pass_idx=6))
    predictor.predict(visit(2, [2, 3], [0, 1], pass_idx=6))  # other tokens
    assert all(np.array_equal(one, other) for one, other in zip(before, predictor._uses, strict=True))


def test_the_output_stays_what_it_is() -> None:
    with served("qwen2_moe", cache="25%", predictor="correlation") as model:
        greedy(model, PROMPTS["one"]).assert_equals(expected("qwen2_moe", torch.float32, "grouped_mm", "one"))
        assert not model.promoe.runtime.predictor_failed
