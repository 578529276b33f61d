from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from promoe.predictors import LayerVisit, PredictorContext
from promoe.predictors.reference import OraclePredictor, RandomPredictor

CONTEXT = PredictorContext([nn.Identity()] * 2, [4, 6], [2, 2])
# Two tokens through two layers.
VISITS = [(0, [0, 1]), (1, [4, 5]), (0, [1, 2]), (1, [0, 3])]


def visit(layer_idx: int) -> LayerVisit:
    return LayerVisit(1, "decode", layer_idx, torch.zeros(1, 8), [[0, 1]])


def test_random_is_uniform_noise_of_the_right_shape() -> None:
    predictor = RandomPredictor(CONTEXT, 3)
    drawn = []
    for _ in range(300):
        one, two = predictor.predict(visit(0))
        assert [(f.steps_ahead, f.layer_idx, f.probabilities.shape) for f in (one, two)] == [(1, 1, (6,)), (2, 0, (4,))]
        drawn.append(one.probabilities)
    values = np.stack(drawn)
    assert 0 <= values.min() < 0.05
    assert 0.95 < values.max() < 1
    assert values.mean(axis=0) == pytest.approx([0.5] * 6, abs=0.08)


def test_random_repeats_with_its_seed() -> None:
    def draw(**seed: int) -> list[float]:
        predictor = RandomPredictor(CONTEXT, 1, **seed)
        return [p for _ in range(3) for p in predictor.predict(visit(0))[0].probabilities.tolist()]

    assert draw() == draw() == draw(seed=0)
    assert draw(seed=1) != draw()


@pytest.mark.parametrize("wrong", [False, True])
def test_an_oracle_tells_the_visits_that_follow(wrong: bool) -> None:
    predictor = OraclePredictor(CONTEXT, 2, VISITS, wrong=wrong)
    told = [predictor.predict(visit(layer_idx)) for layer_idx, _ in VISITS]
    assert [[(f.steps_ahead, f.layer_idx) for f in forecasts] for forecasts in told] == [
        [(1, 1), (2, 0)],
        [(1, 0), (2, 1)],
        [(1, 1)],
        [],
    ]
    truth = [[[4, 5], [1, 2]], [[1, 2], [0, 3]], [[0, 3]], []]
    for forecasts, used in zip(told, truth, strict=True):
        for forecast, ids in zip(forecasts, used, strict=True):
            probabilities = [
                1.0 if (e in ids) != wrong else 0.0 for e in range(CONTEXT.num_experts[forecast.layer_idx])
            ]
            assert forecast.probabilities.tolist() == probabilities


def test_an_oracle_that_is_asked_too_often_says_nothing() -> None:
    predictor = OraclePredictor(CONTEXT, 2, VISITS[:1])
    assert [predictor.predict(visit(0)) for _ in range(3)] == [[], [], []]


def test_an_oracle_without_visits() -> None:
    assert OraclePredictor(CONTEXT, 2, []).predict(visit(0)) == []
