from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from promoe.predictors import Forecast, LayerVisit, PredictorContext
from promoe.predictors.base import horizon
from promoe.predictors.history import PopularityPredictor, PreviousPredictor


def context(layers: int, num_experts: int = 4, top_k: int = 2) -> PredictorContext:
    return PredictorContext([nn.Identity()] * layers, [num_experts] * layers, [top_k] * layers)


def visit(layer_idx: int, *chosen: list[int], pass_idx: int = 1) -> LayerVisit:
    phase = "decode" if len(chosen) == 1 else "prefill"
    return LayerVisit(pass_idx, phase, layer_idx, torch.zeros(len(chosen), 8), list(chosen))


def said(forecasts: list[Forecast]) -> dict[tuple[int, int], list[float]]:
    """(steps ahead, layer) -> probabilities, in the order given."""
    return {(f.steps_ahead, f.layer_idx): f.probabilities.tolist() for f in forecasts}


# -- the visits ahead -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_idx", "lookahead", "num_layers", "wanted"),
    [
        (0, 1, 3, [(1, 1)]),
        (0, 2, 3, [(1, 1), (2, 2)]),
        (1, 2, 3, [(1, 2), (2, 0)]),
        (2, 2, 3, [(1, 0), (2, 1)]),
        (2, 3, 3, [(1, 0), (2, 1), (3, 2)]),
        (1, 99, 3, [(1, 2), (2, 0), (3, 1)]),
        (0, 1, 1, [(1, 0)]),
        (0, 4, 1, [(1, 0)]),
    ],
)
def test_horizon_goes_on_into_the_next_token(
    layer_idx: int, lookahead: int, num_layers: int, wanted: list[tuple[int, int]]
) -> None:
    assert horizon(layer_idx, lookahead, num_layers) == wanted


# -- previous ---------------------------------------------------------------------------------------------------


def test_previous_repeats_each_layers_last_visit() -> None:
    predictor = PreviousPredictor(context(3), 2)
    assert predictor.predict(visit(0, [0, 1])) == []  # nothing is known of the next layers yet
    assert said(predictor.predict(visit(1, [1, 2]))) == {(2, 0): [0.9, 0.9, 0.05, 0.05]}
    first = said(predictor.predict(visit(2, [2, 3])))
    assert first == {(1, 0): [0.9, 0.9, 0.05, 0.05], (2, 1): [0.05, 0.9, 0.9, 0.05]}
    # The next token: layer 0 changes its mind, which its own later forecasts follow.
    assert said(predictor.predict(visit(0, [3, 0]))) == {
        (1, 1): [0.05, 0.9, 0.9, 0.05],
        (2, 2): [0.05, 0.05, 0.9, 0.9],
    }
    predictor.predict(visit(1, [0, 3]))
    assert said(predictor.predict(visit(2, [0, 1]))) == {
        (1, 0): [0.9, 0.05, 0.05, 0.9],
        (2, 1): [0.9, 0.05, 0.05, 0.9],
    }


def test_previous_of_a_prompt_is_its_last_token() -> None:
    predictor = PreviousPredictor(context(1), 1)
    assert said(predictor.predict(visit(0, [0, 1], [2, 3]))) == {(1, 0): [0.05, 0.05, 0.9, 0.9]}


def test_previous_of_one_layer() -> None:
    predictor = PreviousPredictor(context(1), 5)
    assert said(predictor.predict(visit(0, [1, 3]))) == {(1, 0): [0.05, 0.9, 0.05, 0.9]}


def test_what_was_forecast_stays_as_it_was() -> None:
    """The engine may look at a forecast later than the predictor's next visit."""
    predictor = PreviousPredictor(context(1), 1)
    (first,) = predictor.predict(visit(0, [0, 1]))
    kept = first.probabilities.copy()
    predictor.predict(visit(0, [2, 3]))
    assert first.probabilities.tolist() == kept.tolist()


# -- popularity -------------------------------------------------------------------------------------------------


def test_popularity_is_the_share_of_tokens_with_one_pseudo_token() -> None:
    """Four experts, top-2: the pseudo-token uses each by one half."""
    predictor = PopularityPredictor(context(2), 2)
    # Nothing known of layer 1: one half each. Layer 0: (1 + 1/2) / 2 and (0 + 1/2) / 2.
    assert said(predictor.predict(visit(0, [0, 1]))) == {
        (1, 1): [0.5] * 4,
        (2, 0): [0.75, 0.75, 0.25, 0.25],
    }
    # Layer 1, three tokens: 0 three times, 1 twice, 3 once.
    found = said(predictor.predict(visit(1, [0, 1], [0, 1], [0, 3])))
    assert list(found) == [(1, 0), (2, 1)]
    assert found[1, 0] == [0.75, 0.75, 0.25, 0.25]
    assert found[2, 1] == pytest.approx([3.5 / 4, 2.5 / 4, 0.5 / 4, 1.5 / 4])
    found = said(predictor.predict(visit(0, [0, 2])))
    assert found[2, 0] == pytest.approx([2.5 / 3, 1.5 / 3, 1.5 / 3, 0.5 / 3])


def test_popularity_approaches_the_true_shares() -> None:
    predictor = PopularityPredictor(context(1, num_experts=8, top_k=2), 1)
    rng = np.random.default_rng(0)
    for _ in range(500):
        (forecast,) = predictor.predict(visit(0, [0, int(rng.integers(1, 8))]))
    assert forecast.probabilities[0] == pytest.approx(1.0, abs=0.01)
    assert forecast.probabilities[1:] == pytest.approx([1 / 7] * 7, abs=0.05)


def test_popularity_is_a_probability_also_where_a_token_names_an_expert_twice() -> None:
    predictor = PopularityPredictor(context(1), 1)
    (forecast,) = predictor.predict(visit(0, [1, 1], [1, 1]))
    assert forecast.probabilities.tolist() == pytest.approx([0.5 / 3, 1.0, 0.5 / 3, 0.5 / 3])


@pytest.mark.parametrize("kind", [PreviousPredictor, PopularityPredictor])
def test_layers_with_different_numbers_of_experts(kind: type[PreviousPredictor | PopularityPredictor]) -> None:
    predictor = kind(PredictorContext([nn.Identity()] * 2, [3, 5], [1, 2]), 2)
    for _ in range(2):
        predictor.predict(visit(0, [2]))
        forecasts = predictor.predict(visit(1, [4, 3]))
    assert [(f.layer_idx, f.probabilities.shape) for f in forecasts] == [(0, (3,)), (1, (5,))]
    assert [int(f.probabilities.argmax()) for f in forecasts] == [2, 3]
