"""The reuse prior of a model, fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from promoe.scheduler.reuse import HORIZON_VISITS, ReusePrior
from promoe.training import reuse
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import RoutingTrace

from .traces import EXPERTS, LAYERS, random_trace


def test_it_is_what_a_prior_learns_from_the_same_tokens() -> None:
    trace, prior = random_trace(prompts=20), ReusePrior(LAYERS, EXPERTS)
    for _, layer_idx, ids in trace.visits():
        prior.observe(layer_idx, [ids])
    found, expected = fit_reuse(trace), prior.learned()
    np.testing.assert_array_equal(found.weights, expected.weights)
    np.testing.assert_array_equal(found.associations, expected.associations)
    assert found.associations.any()


def test_experts_that_were_not_used_have_their_place() -> None:
    assert fit_reuse(random_trace(), EXPERTS + 3).associations.shape == (LAYERS, EXPERTS + 3, EXPERTS + 3)


def test_of_a_long_trace_the_last_tokens_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(prompts=20)
    monkeypatch.setattr(reuse, "MAX_TOKENS", 40)
    monkeypatch.setattr(reuse, "BLOCK_TOKENS", 7)
    found = fit_reuse(trace)
    monkeypatch.setattr(reuse, "MAX_TOKENS", 20_000)
    np.testing.assert_array_equal(found.weights, fit_reuse(trace.last(40)).weights)
    assert not np.array_equal(found.weights, fit_reuse(trace).weights)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_predictors_word_gets_the_weight_that_it_deserves(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that knows the next tokens much, of one that knows nothing of them little."""
    trace = recorded_at_random()
    ahead = np.stack([np.roll(trace.experts, -step, axis=0) for step in range(1, HORIZON_VISITS + 1)])
    truth = np.full((LAYERS, trace.num_tokens, EXPERTS), -2.0, dtype=np.float32)
    for of_step in ahead:
        np.put_along_axis(truth, of_step.transpose(1, 0, 2).astype(np.int64), 2.0, axis=2)
    rng = np.random.default_rng(0)

    class Foreseeing:
        config = SimpleNamespace(foresees_reuse=True)

        def typical_reuse(self) -> Any:
            return np.zeros((LAYERS, EXPERTS), dtype=np.float32)

        def reuse_log_odds(self, gate_inputs: torch.Tensor) -> torch.Tensor:
            rows = gate_inputs[:, 0, 0].long().numpy()
            of_rows = truth[:, rows]
            return torch.from_numpy(of_rows if is_right else rng.permuted(of_rows, axis=2))

    found = fit_reuse(trace, predictor=Foreseeing())  # type: ignore[arg-type]
    assert found.weights.shape == (5,)
    assert found.weights[3] > 1.0 if is_right else abs(found.weights[3]) < 0.2


def recorded_at_random() -> RoutingTrace:
    """What gates saw says which row it is of."""

    class Records:
        gates: Sequence[dict[str, torch.Tensor]] = ()

        def gate_inputs(self, rows: slice) -> torch.Tensor:
            return torch.arange(rows.start, rows.stop).float()[:, None, None]

    return replace(random_trace(prompts=20), recorded=Records())
