from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler import PoolSpec, Scheduler, SchedulerConfig
from promoe.scheduler.forecast_accuracy import BATCH_OUTCOMES, ForecastAccuracy

from .simulated import Tally


def scored(*forecasts: tuple[int, list[float]], used: list[int] | None) -> list[tuple[int, int, int, float]]:
    """Return the scores of forecasts (steps ahead, probabilities) of a visit that used these experts."""
    tally = Tally()
    accuracy = ForecastAccuracy(tally)
    for steps_ahead, probabilities in forecasts:
        accuracy.forecast(3, steps_ahead, np.array(probabilities))
    accuracy.visited(3, used)
    accuracy.score()
    return tally.scored


def test_as_many_are_named_as_the_visit_needed() -> None:
    assert scored((1, [0.9, 0.1, 0.8, 0.7]), used=[0, 1]) == [(1, 2, 1, 1.0)]
    assert scored((1, [0.9, 0.1, 0.8, 0.7]), used=[0, 2]) == [(1, 2, 2, 1.0)]
    assert scored((1, [0.9, 0.1, 0.8, 0.7]), used=[1]) == [(1, 1, 0, 0.25)]
    assert scored((1, [0.0, 0.0, 0.0, 0.0]), used=[0, 1, 2, 3]) == [(1, 4, 4, 4.0)]


def test_each_distance_is_judged_by_itself_and_the_latest_forecast_counts() -> None:
    found = scored((2, [1.0, 0.0, 0.0, 0.0]), (1, [0.0, 1.0, 0.0, 0.0]), (1, [0.0, 0.0, 1.0, 0.0]), used=[2])
    assert sorted(found) == [(1, 1, 1, 0.25), (2, 1, 0, 0.25)]


def test_what_is_no_outcome_is_not_scored() -> None:
    assert scored((1, [1.0, 0.0, 0.0, 0.0]), used=None) == []
    assert scored((1, [1.0, 0.0, 0.0, 0.0]), used=[]) == []


def test_a_predictor_may_reuse_its_array() -> None:
    tally = Tally()
    accuracy = ForecastAccuracy(tally)
    probabilities = np.array([1.0, 0.0])
    accuracy.forecast(0, 1, probabilities)
    probabilities[:] = (0.0, 1.0)
    accuracy.visited(0, [0])
    accuracy.score()
    assert tally.scored == [(1, 1, 1, 0.5)]


@pytest.mark.parametrize("calibrate", [True, False])
def test_the_scheduler_scores_forecasts_of_decode_and_not_of_prompts(calibrate: bool) -> None:
    tally = Tally()
    config = SchedulerConfig([4, 4], [(10,)] * 2, [PoolSpec(4, (0, 1))], calibrate=calibrate)
    scheduler = Scheduler(config, tally)
    for _ in range(2):
        for layer in (0, 1):
            with_visit(scheduler, layer, [1], [[1]])
            scheduler.forecast(1, 1 - layer, [0.1, 0.9, 0.2, 0.3])
    with_visit(scheduler, 0, [0, 1, 2, 3], [[0], [1], [2], [3]])  # a prompt, where one token was expected
    scheduler.score_forecasts()
    assert tally.scored == [(1, 1, 1, 0.25)] * 3


def with_visit(scheduler: Scheduler, layer: int, ids: list[int], tokens: list[list[int]]) -> None:
    scheduler.begin_visit(layer, ids, tokens).close()


def test_forecasts_are_scored_unasked_once_there_are_some() -> None:
    tally = Tally()
    accuracy = ForecastAccuracy(tally)
    for _ in range(BATCH_OUTCOMES + 1):
        accuracy.forecast(0, 1, np.array([1.0, 0.0]))
        accuracy.visited(0, [0])
    assert len(tally.scored) == BATCH_OUTCOMES
    accuracy.score()
    accuracy.score()
    assert tally.scored == [(1, 1, 1, 0.5)] * (BATCH_OUTCOMES + 1)
