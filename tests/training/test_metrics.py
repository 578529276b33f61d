"""Measures, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.training.metrics import Calibration, Figures, Misses, Transfer, name_of_rate, top

# Three tokens, four experts, two each.
SCORES = np.array([[0.9, 0.8, 0.1, 0.0], [0.9, 0.1, 0.8, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=np.float32)
NEEDED = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=bool)
PREDICTED = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], dtype=bool)


def test_top_takes_the_largest_and_of_equal_ones_the_lower_ids() -> None:
    scores = np.array([[0.1, 0.5, 0.2, 0.4], [1.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    assert top(scores, 2).tolist() == [[False, True, False, True], [True, True, False, False]]
    np.testing.assert_array_equal(top(SCORES, 2), PREDICTED)


def test_a_rate_is_named_in_percent() -> None:
    assert [name_of_rate(rate) for rate in (0.125, 0.25, 1.0)] == ["12.5%", "25%", "100%"]


@pytest.mark.parametrize(
    ("lookahead", "experts", "rate"),
    # 24 GB/s for 2 ms a layer moves 48 MB; an expert has 16 MB: three in a layer's time.
    [(1, 6.0, 0.5), (2, 6.0, 1.0), (1, 3.0, 1.0), (1, 12.0, 0.25), (8, 2.0, 1.0), (1, 0.0, 1.0)],
)
def test_fetch_rate_is_the_share_that_arrives_in_time(lookahead: int, experts: float, rate: float) -> None:
    assert Transfer(24e9, 16e6, 0.002).fetch_rate(lookahead, experts) == pytest.approx(rate)


def test_misses_are_shares_of_what_is_absent() -> None:
    misses = Misses()
    absent = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=bool)
    misses.add(absent, NEEDED, PREDICTED)
    # Absent and needed: 2, 0, 1. Absent and predicted: 2, 1, 1. All three: 2, 0, 0.
    link = Transfer(10.0, 10.0, 1.0)  # one expert per layer's time
    assert misses.to_json(0.5, 1, link) == {
        "recall": pytest.approx(2 / 3),
        "precision": 0.5,
        "predicted_per_visit": pytest.approx(4 / 3),
        "fetch_rate": pytest.approx(3 / 4),
        "goodpred": pytest.approx(3 / 8),
    }
    assert misses.to_json(0.5, 1, None)["fetch_rate"] is None
    assert set(Misses().to_json(None, 1, link).values()) == {None}


def test_accuracy_exact_and_coverage_by_hand() -> None:
    figures = Figures(None, 1, {})
    figures.add(0, SCORES, PREDICTED, NEEDED)
    json = figures.to_json(1, None)
    assert json["accuracy"] == 3 / 6
    assert json["exact"] == pytest.approx(1 / 3)
    # In the order of scores, the last needed expert comes 2nd, 3rd and 4th.
    assert json["coverage_error"] == pytest.approx((2 + 3 + 4) / 3)
    assert (json["layers"], json["exact_layers"]) == ([0.5], [pytest.approx(1 / 3)])
    assert json["coverage_error_layers"] == [pytest.approx(3.0)]
    assert json["calibration"] is None
    assert json["misses"] == {}


def test_figures_of_some_tokens_regard_these_alone() -> None:
    held = np.zeros((2, 1, 4), dtype=bool)  # the first two tokens were replayed, with an empty cache
    figures = Figures(np.array([False, True, True]), 1, {("lru", 0.25): held})
    figures.add(0, SCORES, PREDICTED, NEEDED)
    json = figures.to_json(1, None)
    assert (json["accuracy"], json["exact"], json["coverage_error"]) == (1 / 4, 0.0, 3.5)
    assert json["misses"]["lru"]["25%"]["recall"] == 0.5
    assert json["misses"]["lru"]["25%"]["predicted_per_visit"] == 2.0


def test_there_are_no_means_where_a_layer_other_than_the_first_is_not_predicted() -> None:
    held = np.zeros((3, 3, 4), dtype=bool)
    figures = Figures(None, 3, {("lru", 0.25): held})
    figures.add(1, SCORES, PREDICTED, NEEDED)
    figures.add_probabilities(1, np.arange(3), SCORES, NEEDED)
    json = figures.to_json(1, None)
    assert (json["accuracy"], json["exact"], json["coverage_error"], json["calibration"]) == (None,) * 4
    assert json["layers"] == [None, 0.5, None]
    assert set(json["misses"]["lru"]["25%"].values()) == {None}
    figures.add(2, SCORES, PREDICTED, NEEDED)
    assert figures.to_json(1, None)["accuracy"] == 0.5


def test_recall_is_the_share_of_what_is_used_among_the_first_scores() -> None:
    figures = Figures(None, 1, {}, fetched=(1, 2, 3, 9))
    figures.add(0, SCORES, PREDICTED, NEEDED)
    # In the order of scores, the needed experts come 1st and 2nd, 1st and 3rd, 3rd and 4th.
    assert figures.recall == {1: [2 / 6], 2: [3 / 6], 3: [5 / 6], 9: [1.0]}
    part = Figures(np.array([False, False, True]), 1, {}, fetched=(3,))
    part.add(0, SCORES, PREDICTED, NEEDED)
    assert part.recall == {3: [1 / 2]}


def test_recall_counts_layers_that_are_predicted_from_exactly_so_far_before() -> None:
    figures = Figures(None, 4, {}, fetched=(2,))
    figures.add(1, SCORES, NEEDED, NEEDED)
    figures.add(2, SCORES, NEEDED, NEEDED)
    figures.add(3, NEEDED.astype(np.float32), NEEDED, NEEDED)
    assert figures.recall == {2: [None, 0.5, 0.5, 1.0]}
    recall = {lookahead: figures.to_json(lookahead, None)["recall"]["2"] for lookahead in (1, 2, 3, 4)}
    assert recall == {1: pytest.approx(2 / 3), 2: 0.75, 3: 1.0, 4: None}
    unknown = Figures(None, 3, {}, fetched=(2,))
    unknown.add(2, SCORES, NEEDED, NEEDED)
    assert unknown.to_json(1, None)["recall"] == {"2": None}, "layer 1 is not predicted"
    assert Figures(None, 3, {}).to_json(1, None)["recall"] == {}


def test_next_tokens_are_those_that_continue_a_prompt() -> None:
    figures = Figures(None, 3, {})
    figures.add_next_token(0, np.array([False, True, True]), PREDICTED, NEEDED)
    assert figures.next_token == [1 / 4, None, None]
    assert figures.to_json(1, None)["next_token_accuracy"] == 1 / 4
    assert figures.to_json(2, None)["next_token_accuracy"] is None  # layer 1 is missing
    part = Figures(np.array([True, True, False]), 3, {})
    part.add_next_token(0, np.array([False, True, True]), PREDICTED, NEEDED)
    assert part.next_token[0] == 1 / 2


def test_calibration_by_hand() -> None:
    calibration = Calibration(2)
    p = np.array([[0.05, 0.05, 0.95, 0.95]], dtype=np.float32)
    calibration.add(0, p, np.array([[False, False, True, False]]))
    calibration.add(1, p[:, :2], np.array([[True, False]]))
    json = calibration.to_json()
    assert json is not None
    # Four outcomes at 0.05, of which one is used, and two at 0.95, of which one is.
    assert json["predicted"] == pytest.approx([0.05, 0.95])
    assert json["observed"] == pytest.approx([1 / 4, 1 / 2])
    squares = [0.05**2, 0.05**2, 0.05**2, 0.95**2, 0.05**2, 0.95**2]
    assert json["brier"] == pytest.approx(sum(squares) / 6)
    assert json["layers"] == pytest.approx([(3 * 0.05**2 + 0.95**2) / 4, (0.95**2 + 0.05**2) / 2])


def test_without_probabilities_there_is_no_calibration() -> None:
    calibration = Calibration(1)
    calibration.add(0, np.empty((0, 4), dtype=np.float32), np.empty((0, 4), dtype=bool))
    assert calibration.to_json() is None
    assert calibration.layers == [None]
