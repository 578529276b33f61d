from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import build

import promoe
from predictors.trained_predictors import make
from promoe.errors import ConfigError
from promoe.predictors import KINDS, LayerVisit, PredictorContext, check_kind, create
from promoe.predictors.correlation import CorrelationPredictor
from promoe.predictors.folded import FoldedPredictor
from promoe.predictors.gate import GatePredictor
from promoe.predictors.history import PopularityPredictor, PreviousPredictor
from promoe.predictors.reference import RandomPredictor
from promoe.runtime.assembly import predictor_context

LAYERS = 3


@pytest.fixture(scope="module")
def context() -> PredictorContext:
    return predictor_context(promoe.find_moe_layers(build("qwen2_moe", layers=LAYERS)))


def test_the_kinds_that_need_no_training() -> None:
    assert {
        "gate": GatePredictor,
        "previous": PreviousPredictor,
        "correlation": CorrelationPredictor,
        "popularity": PopularityPredictor,
        "random": RandomPredictor,
    } == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_created_by_name(kind: str, context: PredictorContext) -> None:
    check_kind(kind)
    assert type(create(kind, context, 2)) is KINDS[kind]
    assert create(kind, context, 2) is not create(kind, context, 2)


@pytest.mark.parametrize("kind", ["mlp", "Gate", "", "none", "oracle"])
def test_an_unknown_kind_is_refused_with_those_that_exist(kind: str, context: PredictorContext) -> None:
    for ask in (lambda: check_kind(kind), lambda: create(kind, context, 2)):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == (
            "The 'predictor' argument must be None (--predictor none), a Predictor, one of 'gate', 'correlation', 'previous', "
            f"'popularity', 'random', or the folder or hub id of a trained one. Got {kind!r} instead."
        )


@pytest.mark.parametrize("lookahead", [1, 2, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_what_every_kind_promises(kind: str, lookahead: int, context: PredictorContext) -> None:
    """Forecasts of later visits, nearest first, each a probability per expert; and the visit is left as it was."""
    predictor = create(kind, context, lookahead)
    rng = np.random.default_rng(0)
    told = 0
    for pass_idx, num_tokens in ((1, 4), (2, 1), (3, 1), (4, 3)):
        for layer_idx in range(LAYERS):
            chosen = [rng.choice(8, 2, replace=False).tolist() for _ in range(num_tokens)]
            phase = "decode" if num_tokens == 1 else "prefill"
            visit = LayerVisit(pass_idx, phase, layer_idx, torch.randn(num_tokens, 64), chosen)
            before = copy.deepcopy(visit)
            forecasts = predictor.predict(visit)
            steps = [forecast.steps_ahead for forecast in forecasts]
            assert steps == sorted(set(steps))
            assert all(1 <= step <= min(lookahead, LAYERS) for step in steps)
            for forecast in forecasts:
                assert forecast.layer_idx == (layer_idx + forecast.steps_ahead) % LAYERS
                assert forecast.probabilities.shape == (8,)
                assert ((forecast.probabilities >= 0) & (forecast.probabilities <= 1)).all()
            assert torch.equal(visit.gate_input, before.gate_input)
            assert visit.chosen == before.chosen
            told += len(forecasts)
    assert told >= 8 * min(lookahead, 1)


def test_a_trained_one_is_created_from_its_folder(tmp_path: Path, context: PredictorContext) -> None:
    sizes = {"num_layers": LAYERS, "hidden_size": 64, "num_experts": 8, "top_k": 2}
    make(**sizes, lookahead=2).save_pretrained(tmp_path)
    check_kind(str(tmp_path))
    predictor = create(str(tmp_path), context, 2)
    assert isinstance(predictor, FoldedPredictor)
    forecasts = predictor.predict(LayerVisit(1, "decode", 2, torch.randn(1, 64), [[0, 1]]))
    assert [(f.steps_ahead, f.layer_idx) for f in forecasts] == [(1, 0), (2, 1)]


def test_a_place_that_holds_no_trained_one(
    tmp_path: Path, context: PredictorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for place in (str(tmp_path), str(tmp_path / "nowhere")):
        for ask in (lambda place=place: check_kind(place), lambda place=place: create(place, context, 2)):
            with pytest.raises(ConfigError, match="There is no trained predictor"):
                ask()


def test_one_of_another_model_is_refused_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    make(hidden_size=32).save_pretrained(tmp_path)
    model = build("qwen2_moe", layers=4)
    with pytest.raises(ConfigError, match="hidden_size = 32, and this model has 64"):
        promoe.patch(model, cache="50%", predictor=str(tmp_path), link="host")
    assert not hasattr(model, "promoe")
    make(hidden_size=64, model_type="mixtral").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type = 'mixtral', and this model has 'qwen2_moe'"):
        promoe.patch(model, cache="50%", predictor=str(tmp_path), link="host")
