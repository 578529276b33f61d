from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from predictors.trained_predictors import EXPERTS, HIDDEN, LAYERS, LOOKAHEAD, TOP_K, Gate, make
from promoe.errors import ConfigError
from promoe.predictors import Forecast, LayerVisit, PredictorContext, ReuseForecast, folded
from promoe.predictors.folded import FoldedPredictor
from promoe.predictors.trained import TRAINED_KINDS


def context(**changes: Any) -> PredictorContext:
    fields: dict[str, Any] = {
        "gates": [Gate() for _ in range(LAYERS)],
        "num_experts": [EXPERTS] * LAYERS,
        "top_k": [TOP_K] * LAYERS,
        "model_type": "qwen2_moe",
    }
    return PredictorContext(**fields | changes)


def visit(layer_idx: int, gate_input: torch.Tensor) -> LayerVisit:
    return LayerVisit(1, "decode", layer_idx, gate_input, [[0, 1]] * len(gate_input))


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("lookahead", [1, 2, LOOKAHEAD, 7])
@pytest.mark.parametrize("kind", ["residual", "mlp"])
def test_it_forecasts_what_the_networks_say(kind: str, lookahead: int, num_tokens: int) -> None:
    trained = make(kind)
    predictor = FoldedPredictor(trained, context(), lookahead)
    x = torch.randn(num_tokens, LAYERS, HIDDEN)
    odds = trained.log_odds(trained.scores(x)).double()
    for layer_idx in range(LAYERS):
        forecasts = predictor.predict(visit(layer_idx, x[:, layer_idx]))
        steps = [k for k in range(1, lookahead + 1) if trained.config.predicts(layer_idx, k)]
        assert [(f.steps_ahead, f.layer_idx) for f in forecasts] == [(k, (layer_idx + k) % LAYERS) for k in steps]
        for forecast in forecasts:
            per_token = torch.sigmoid(odds[layer_idx, forecast.steps_ahead - 1])
            expected = 1 - (1 - per_token).prod(0)
            np.testing.assert_allclose(forecast.probabilities, expected.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["residual", "mlp"])
def test_large_products_are_made_of_small_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of larger ones, numpy's library would take the cores from the model."""
    trained, x = make(kind), torch.randn(1, HIDDEN)
    whole = FoldedPredictor(trained, context(), LOOKAHEAD).predict(visit(0, x))
    monkeypatch.setattr(folded, "ONE_THREAD_ELEMENTS", 3 * HIDDEN + 1)  # less than the second products have
    predictor = FoldedPredictor(trained, context(), LOOKAHEAD)
    assert {block.shape[1] for layer in predictor._layers for block in layer._inner._blocks} <= {0, 1, 2, 3}
    assert all(layer._by_torch for layer in predictor._layers if layer.targets)
    for forecast, expected in zip(predictor.predict(visit(0, x)), whole, strict=True):
        np.testing.assert_allclose(forecast.probabilities, expected.probabilities, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_inputs_in_the_models_dtype(dtype: torch.dtype) -> None:
    trained = make()
    x = torch.randn(1, HIDDEN).to(dtype)
    (forecast,) = FoldedPredictor(trained, context(), 1).predict(visit(0, x))
    gate_inputs = torch.zeros(1, LAYERS, HIDDEN)
    gate_inputs[:, 0] = x.float()
    expected = torch.sigmoid(trained.log_odds(trained.scores(gate_inputs)))[0, 0, 0]
    np.testing.assert_allclose(forecast.probabilities, expected.detach().numpy(), atol=0.05)


def test_each_token_is_forecast_from_its_own_input_in_whatever_mode() -> None:
    """Buffers are used again: a forecast is not to change with the next, and modes may follow in any order."""
    trained, inputs = make(), [torch.randn(1, HIDDEN).bfloat16() for _ in range(3)]
    predictor = FoldedPredictor(trained, context(), 1)
    with torch.inference_mode():
        found = [predictor.predict(visit(0, inputs[0]))[0].probabilities]
    with torch.no_grad():
        found.append(predictor.predict(visit(0, inputs[1]))[0].probabilities)
    found.append(predictor.predict(visit(0, inputs[2]))[0].probabilities)
    for x, probabilities in zip(inputs, found, strict=True):
        (forecast,) = FoldedPredictor(trained, context(), 1).predict(visit(0, x))
        np.testing.assert_array_equal(probabilities, forecast.probabilities)
    assert not np.array_equal(found[0], found[1])


def test_made_in_inference_mode_it_predicts_in_any() -> None:
    trained, x = make(), torch.randn(1, HIDDEN)
    with torch.inference_mode():
        predictor = FoldedPredictor(trained, context(), LOOKAHEAD)
    with torch.no_grad():
        found = predictor.predict(visit(0, x))
    for forecast, expected in zip(
        found, FoldedPredictor(trained, context(), LOOKAHEAD).predict(visit(0, x)), strict=True
    ):
        np.testing.assert_array_equal(forecast.probabilities, expected.probabilities)


def test_the_published_configuration_names_the_top_k_at_one_distance() -> None:
    trained = make("promoe-paper", lookahead=2)
    predictor = FoldedPredictor(trained, context(), lookahead=1)  # it has a distance of its own
    x = torch.randn(1, LAYERS, HIDDEN)
    scores = trained.scores(x)
    assert [len(predictor.predict(visit(i, x[:, i]))) for i in range(LAYERS)] == [2, 1, 0, 0]
    (forecast,) = predictor.predict(visit(1, x[:, 1]))
    assert (forecast.steps_ahead, forecast.layer_idx) == (2, 3)
    assert sorted(np.flatnonzero(forecast.probabilities > 0.5)) == sorted(scores[1, 1, 0].topk(TOP_K).indices.tolist())
    assert set(forecast.probabilities.tolist()) == {0.99, 0.01}


def test_a_model_that_uses_every_expert() -> None:
    trained = make(top_k=EXPERTS)
    predictor = FoldedPredictor(trained, context(top_k=[EXPERTS] * LAYERS), 1)
    (forecast,) = predictor.predict(visit(0, torch.randn(1, HIDDEN)))
    assert forecast.probabilities.tolist() == [1.0] * EXPERTS


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_extreme_inputs_give_probabilities(kind: str) -> None:
    predictor = FoldedPredictor(make(kind), context(), LOOKAHEAD)
    for gate_input in (torch.full((1, HIDDEN), 1e6), torch.full((2, HIDDEN), -1e6), torch.zeros(1, HIDDEN)):
        for forecast in predictor.predict(visit(0, gate_input)):
            assert ((forecast.probabilities >= 0) & (forecast.probabilities <= 1)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "with model_type = 'qwen2_moe', and this model has 'mixtral'"),
        (
            {"gates": [Gate()] * 3, "num_experts": [8] * 3, "top_k": [2] * 3},
            "with num_layers = 4, and this model has 3",
        ),
        ({"gates": [Gate(hidden_size=32)] * 4}, "with hidden_size = 16, and this model has 32"),
        ({"gates": [Gate(6)] * 4, "num_experts": [6] * 4}, "with num_experts = 8, and this model has 6"),
        ({"num_experts": [8, 8, 8, 6]}, "with num_experts = 8, and this model has [8, 8, 8, 6]"),
        ({"top_k": [4] * 4}, "with top_k = 2, and this model has 4"),
    ],
)
def test_a_predictor_of_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FoldedPredictor(make(), context(**changes), 1)
    assert "trained for demo/model " + message in str(caught.value)
    assert "promoe-train" in str(caught.value)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("lookahead", [1, LOOKAHEAD])
def test_it_foresees_the_reuse_that_the_networks_say(lookahead: int, num_tokens: int) -> None:
    trained = make(foresees_reuse=True)
    trained.reuse_weights.fill_(0.5)
    predictor = FoldedPredictor(trained, context(), lookahead)
    x = torch.randn(num_tokens, LAYERS, HIDDEN)
    with torch.inference_mode():
        odds, reuse = trained.log_odds(trained.scores(x)).double(), trained.reuse_log_odds(x)
    for layer_idx in range(LAYERS):
        foreseen, *forecasts = predictor.predict(visit(layer_idx, x[:, layer_idx]))
        assert isinstance(foreseen, ReuseForecast)
        assert foreseen.layer_idx == layer_idx
        np.testing.assert_allclose(foreseen.log_odds, reuse[layer_idx].mean(0).numpy(), rtol=1e-4, atol=1e-5)
        assert len(forecasts) == lookahead
        for step, forecast in enumerate(forecasts):
            expected = 1 - (1 - torch.sigmoid(odds[layer_idx, step])).prod(0)
            np.testing.assert_allclose(forecast.probabilities, expected.numpy(), rtol=1e-4, atol=1e-6)


def test_without_a_reuse_prior_that_weighs_it_no_reuse_is_foreseen() -> None:
    predictor = FoldedPredictor(make(foresees_reuse=True), context(), 1)
    assert predictor.reuse is None
    assert [type(found) for found in predictor.predict(visit(0, torch.randn(1, HIDDEN)))] == [Forecast]
