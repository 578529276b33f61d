"""Predictors that break: the answers are still computed, and are right."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from served import PROMPTS, greedy

from promoe.predictors import Forecast, LayerVisit

from .support import WAYS, assert_right, faulty, never


class Raising:
    """A predictor that raises at its third visit, in a thread, or in the forward if it is quick."""

    def __init__(self, error: type[BaseException], quick: bool) -> None:
        self.error = error
        self.quick = quick
        self.visits = 0

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        self.visits += 1
        if self.visits == 3:
            raise self.error("no idea")
        return [Forecast(1, (visit.layer_idx + 1) % 3, np.full(8, 0.9))]


@pytest.fixture(params=[False, True], ids=["in a thread", "in the forward"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr("promoe.runtime.prediction.has_spare_core", lambda: False)
    return bool(request.param)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
@pytest.mark.parametrize("way", WAYS)
def test_predictor_that_raises(
    way: str, error: type[BaseException], quick: bool, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = Raising(error, quick)
    with caplog.at_level(logging.ERROR, "promoe"), faulty(way, never, predictor=predictor) as (model, _):
        forecaster = model.promoe.runtime.forecaster
        for _ in range(3):
            assert_right(model, "short")
            forecaster.drain()
        assert forecaster.in_forward == quick
        assert predictor.visits == 3
        assert model.promoe.stats().predictor == "Raising (failed)"
    assert caplog.text.count("The predictor failed and is switched off") == 1


@pytest.mark.parametrize("way", WAYS)
def test_interruption_of_a_predictor_in_the_forward(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes from the user and is not the predictor's fault."""
    monkeypatch.setattr("promoe.runtime.prediction.has_spare_core", lambda: False)
    predictor = Raising(KeyboardInterrupt, quick=True)
    with faulty(way, never, predictor=predictor) as (model, _):
        with pytest.raises(KeyboardInterrupt):
            greedy(model, PROMPTS["short"])
        assert_right(model, "short")
        assert predictor.visits > 3
        assert model.promoe.stats().predictor == "Raising"


NOT_PROBABILITIES: dict[str, Any] = {
    "nan": np.full(8, np.nan),
    "infinite": np.array([np.inf, -np.inf] * 4),
    "out of range": np.arange(8) * 1e9 - 4e9,
    "too few": np.full(7, 0.9),
    "a matrix": np.full((1, 8), 0.9),
    "words": ["likely"] * 8,
    "nothing": None,
}


@pytest.mark.parametrize("name", NOT_PROBABILITIES)
def test_predictions_that_are_none(name: str, quick: bool) -> None:
    class Odd:
        def predict(self, visit: LayerVisit) -> list[Forecast]:
            return [Forecast(1, (visit.layer_idx + 1) % 3, NOT_PROBABILITIES[name])]

    Odd.quick = quick  # type: ignore[attr-defined]
    with faulty("RAM, workers", never, predictor=Odd(), min_probability=0.01) as (model, _):
        for prompt in ("short", "one", "padded"):
            assert_right(model, prompt)
