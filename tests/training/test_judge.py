"""Accuracy and misses, against counts by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promoe.training import evaluate as evaluate_module
from promoe.training.baselines import KINDS, Kind
from promoe.training.evaluate import judge, replay_caches
from promoe.training.hidden_states import Gate, Trained
from promoe.training.metrics import Caches, Transfer
from promoe.training.routing_traces import RoutingTrace

from . import hidden_traces
from .traces import EXPERTS, LAYERS, random_trace, trace_of


def judge_kinds(
    fit: RoutingTrace,
    held_out: RoutingTrace,
    names: Sequence[str],
    lookaheads: Sequence[int],
    caches: Caches | None = None,
) -> dict[str, Any]:
    return judge({name: partial(KINDS[name], fit) for name in names}, held_out, lookaheads, caches or {})


class Fixed(Kind):
    """Gives what it is told: by layer, scores of every token, and of its successor."""

    def __init__(self, scores: Mapping[int, Any], of_next: Mapping[int, Any] | None = None) -> None:
        self._scores, self._of_next = scores, of_next or {}

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Any:
        return self._scores.get(layer_idx)

    def next_token_scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Any:
        return self._of_next.get(layer_idx)

    def probabilities(self, scores: Any, layer_idx: int, lookahead: int) -> Any:
        return scores


def one_hot(ids: Sequence[int]) -> Any:
    return np.eye(4, dtype=np.float32)[list(ids)]


def test_a_kind_that_knows_is_always_right_and_one_that_guesses_is_not() -> None:
    """In this trace the token decides the first layer, and each layer the next."""
    fit, held_out = random_trace(prompts=40).split()
    result = judge_kinds(fit, held_out, list(KINDS), [1, 2])
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
    figures = judge_kinds(fit, held_out, ["token"], [1], caches)["token"]["1"]
    assert figures["accuracy"] == 0.75
    assert figures["misses"] == {
        "lru": {
            "25%": {
                "recall": pytest.approx(2 / 3),
                "precision": pytest.approx(2 / 3),
                "predicted_per_visit": 3 / 4,
                "fetch_rate": None,
                "goodpred": None,
            }
        }
    }


def test_misses_are_of_the_first_tokens_if_only_these_were_replayed() -> None:
    trace = random_trace(prompts=40)
    fit, held_out = trace.split()
    caches = replay_caches(held_out, ["next_use"], [0.5])
    part = {key: held[:10] for key, held in caches.items()}
    assert judge_kinds(fit, held_out, ["previous"], [1], part) != judge_kinds(fit, held_out, ["previous"], [1], caches)


def test_a_cache_of_everything_has_no_misses_but_the_first() -> None:
    trace = random_trace()
    (held,) = replay_caches(trace, ["lru"], [1.0]).values()
    for layer_idx in range(LAYERS):
        seen = np.cumsum(np.eye(EXPERTS)[trace.experts[:, layer_idx]].sum(axis=1), axis=0) > 0
        np.testing.assert_array_equal(held[1:, layer_idx], seen[:-1])


def test_where_nothing_is_predicted_there_are_no_figures() -> None:
    trace = trace_of([[[0]], [[1]]], [0, 1], [1, 1], num_experts=2)
    figures = judge_kinds(trace, trace, ["correlation"], [1], replay_caches(trace, ["lru"], [0.5]))["correlation"]["1"]
    assert set(figures.pop("misses")["lru"]["50%"].values()) == {None}
    assert {name: value for name, value in figures.items() if value not in ([None], {})} == dict.fromkeys(
        (
            "accuracy",
            "exact",
            "coverage_error",
            "next_token_accuracy",
            "calibration",
            "prefill",
            "decode",
        )
    )


# Two prompts of two tokens, the second of each generated; two layers, one expert each.
TWO_LAYERS = replace(
    trace_of([[[0], [1]], [[1], [2]], [[2], [3]], [[3], [0]]], [0, 1, 2, 3], [2, 2], num_experts=4),
    generated=np.array([False, True, False, True]),
)


def test_prefill_and_decode_are_judged_apart() -> None:
    kind = Fixed({0: one_hot([0, 0, 2, 0]), 1: one_hot([1, 2, 0, 0])})
    caches = replay_caches(TWO_LAYERS, ["lru"], [1.0])
    figures = judge({"fixed": lambda: kind}, TWO_LAYERS, [1], caches)["fixed"]["1"]
    assert figures["layers"] == [0.5, 0.75]
    assert figures["accuracy"] == 0.625
    assert figures["prefill"]["layers"] == [1.0, 0.5]
    assert figures["decode"]["layers"] == [0.0, 1.0]
    assert figures["decode"]["coverage_error"] == pytest.approx((4 + 1) / 2)  # equal scores count as before
    # Everything that is used is used for the first time. Absent and predicted: all but the 0 of the second token.
    recall = {part: figures[part]["misses"]["lru"]["100%"]["recall"] for part in ("prefill", "decode")}
    assert recall == {"prefill": 3 / 4, "decode": 1 / 2}
    assert figures["misses"]["lru"]["100%"]["recall"] == 5 / 8
    assert figures["calibration"]["layers"] == pytest.approx([1 / 4, 1 / 8])
    assert figures["prefill"]["calibration"]["brier"] == pytest.approx(1 / 8)


def test_a_phase_without_tokens_has_no_figures() -> None:
    trace = replace(TWO_LAYERS, generated=np.ones(4, dtype=bool))
    figures = judge_kinds(trace, trace, ["token"], [1])["token"]["1"]
    assert figures["prefill"] is None
    assert figures["decode"]["accuracy"] == figures["accuracy"] == 1.0


def test_next_tokens_are_predicted_by_their_predecessor_in_the_same_prompt() -> None:
    """Of the first layer, tokens 1 and 3 are judged, by what tokens 0 and 2 said."""
    kind = Fixed({1: one_hot([0, 0, 0, 0])}, {0: one_hot([1, 2, 0, 0])})
    figures = judge({"fixed": lambda: kind}, TWO_LAYERS, [1], {})["fixed"]["1"]
    assert figures["next_token_layers"] == [0.5, None]
    assert figures["next_token_accuracy"] == 0.5
    assert figures["decode"]["next_token_accuracy"] == 0.5
    assert figures["prefill"]["next_token_accuracy"] is None


def test_fetch_rate_depends_on_the_lookahead_even_where_predictions_do_not() -> None:
    caches = replay_caches(TWO_LAYERS, ["lru"], [0.25])
    kind = partial(KINDS["token"], TWO_LAYERS)
    link = Transfer(1.0, 4.0, 1.0)  # a quarter of an expert per layer's time
    by_lookahead = judge({"token": kind}, TWO_LAYERS, [1, 2, 8], caches, link)["token"]
    figures = [by_lookahead[k]["misses"]["lru"]["25%"] for k in ("1", "2", "8")]
    assert [f["predicted_per_visit"] for f in figures] == [1.0] * 3  # two slots: nothing is there again
    assert [f["fetch_rate"] for f in figures] == [0.25, 0.5, 1.0]
    assert [f["goodpred"] for f in figures] == [0.25, 0.5, 1.0]


def test_calibration_is_judged_on_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Sampled(Fixed):
        def probabilities(self, scores: Any, layer_idx: int, lookahead: int) -> Any:
            asked.append(len(scores))
            return scores

    monkeypatch.setattr(evaluate_module, "CALIBRATION_OUTCOMES", 16)  # two tokens of two layers of four experts
    truth = {layer: one_hot(TWO_LAYERS.experts[:, layer, 0]) for layer in (0, 1)}
    figures = judge({"fixed": lambda: Sampled(truth)}, TWO_LAYERS, [1], {})["fixed"]["1"]
    assert asked == [2, 2]
    assert figures["calibration"]["brier"] == 0.0
    assert figures["calibration"]["predicted"] == figures["calibration"]["observed"] == [0.0, 1.0]


def test_kinds_from_hidden_states_follow_the_same_protocol(tmp_path: Path) -> None:
    fit, held_out = hidden_traces.random_trace(tmp_path).routing.split()
    kinds = {"gate": lambda: Gate(fit), "residual": lambda: Trained(hidden_traces.random_predictor())}
    result = judge(kinds, held_out, [1, 2, 3], {})
    for by_lookahead in result.values():
        for lookahead in ("1", "2"):
            figures = by_lookahead[lookahead]
            assert figures["layers"][0] is None
            assert figures["accuracy"] == pytest.approx(np.mean(figures["layers"][1:]))
            assert figures["next_token_accuracy"] is not None
            assert figures["next_token_layers"][2] is None
    # Trained for two layers ahead: at three, both layers are predicted from the first; across tokens nothing is.
    assert result["residual"]["3"]["layers"] == result["residual"]["2"]["layers"]
    assert result["residual"]["3"]["next_token_accuracy"] is None
