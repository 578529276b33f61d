"""Kinds that predict from hidden states, against the products that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from promoe.training import hidden_states
from promoe.training.baselines import used
from promoe.training.hidden_states import HIDDEN_KINDS, Gate, Linear, SklearnMlp, Trained, gate_scores
from promoe.training.kinds import NAMES_OF_HIDDEN_KINDS
from promoe.training.metrics import top
from promoe.training.routing_traces import RoutingTrace, TraceError

from .hidden_traces import EXPERTS, HIDDEN, LAYERS, TOP_K, random_predictor, random_trace, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> RoutingTrace:
    return random_trace(tmp_path / "trace").routing


def inputs_of(trace: RoutingTrace) -> torch.Tensor:
    """Gate inputs `[n, L, H]` of all tokens."""
    rows = slice(trace.first_row, trace.first_row + trace.num_tokens)
    assert trace.recorded is not None
    return torch.stack([trace.recorded.layer_inputs(i, rows).float() for i in range(trace.num_layers)], dim=1)


def weight_of(trace: RoutingTrace, layer_idx: int) -> torch.Tensor:
    assert trace.recorded is not None
    return trace.recorded.gates[layer_idx]["weight"]


def test_names_are_those_that_are_checked_without_loading_torch() -> None:
    assert tuple(HIDDEN_KINDS) == NAMES_OF_HIDDEN_KINDS


def test_blocks_are_all_tokens_of_a_part_of_a_trace(trace: RoutingTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    _, held_out = trace.split()
    monkeypatch.setattr(hidden_states, "BLOCK_TOKENS", 5)
    found = list(hidden_states.blocks(held_out, 1))
    assert [(start, len(x)) for start, x in found] == [(0, 5), (5, 5), (10, 5), (15, 1)]
    torch.testing.assert_close(torch.cat([x for _, x in found]), inputs_of(trace)[64:, 1], rtol=0, atol=0)


@pytest.mark.parametrize(("layer_idx", "lookahead", "source"), [(2, 1, 1), (2, 2, 0), (1, 1, 0), (2, 8, 0), (1, 2, 0)])
def test_gate_is_the_target_layers_gate_on_an_earlier_input(
    trace: RoutingTrace, layer_idx: int, lookahead: int, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "BLOCK_TOKENS", 7)
    fit, held_out = trace.split()
    scores = Gate(fit).scores(held_out, layer_idx, lookahead)
    wanted = inputs_of(held_out)[:, source] @ weight_of(trace, layer_idx).T
    np.testing.assert_allclose(scores, wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_the_first_layer_is_not_predicted_within_the_token(trace: RoutingTrace) -> None:
    for kind in (Gate(trace), Linear(trace), Trained(random_predictor())):
        assert kind.scores(trace, 0, 1) is None


def test_gate_looks_from_a_tokens_last_layers_to_the_next_ones_first(trace: RoutingTrace) -> None:
    kind = Gate(trace)
    scores = kind.next_token_scores(trace, 1, 2)  # layer 1 of the next token is 2 after layer 2 of this one
    wanted = inputs_of(trace)[:, 2] @ weight_of(trace, 1).T
    np.testing.assert_allclose(scores, wanted.numpy(), rtol=1e-5, atol=1e-5)
    assert kind.next_token_scores(trace, 2, 1) is None  # that would be this token
    assert kind.next_token_scores(trace, 0, LAYERS + 1) is None  # more than a token before


def test_gate_gives_the_selected_more_than_even_odds(trace: RoutingTrace) -> None:
    kind = Gate(trace)
    scores = kind.scores(trace, 2, 1)
    assert scores is not None
    probabilities = kind.probabilities(scores, 2, 1)
    np.testing.assert_array_equal(probabilities > 0.5, top(scores, TOP_K))


def test_a_gate_may_have_a_bias_or_a_correction() -> None:
    x = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    bias = torch.tensor([0.0, -5.0, 3.0])
    plain = gate_scores({"weight": weight}, 0, 3)(x)
    assert plain.tolist() == [[1.0, 2.0, -1.0]]
    assert gate_scores({"bias": bias, "weight": weight}, 0, 3)(x).tolist() == [[1.0, -3.0, 2.0]]
    corrected = gate_scores({"weight": weight, "e_score_correction_bias": bias}, 0, 3)(x)
    torch.testing.assert_close(corrected, plain.sigmoid() + bias)
    nested = gate_scores({"moe_statics.e_score_correction_bias": bias[None], "weight": weight}, 0, 3)(x)
    torch.testing.assert_close(nested, corrected)
    with pytest.raises(TraceError, match=r"layer 4 has no weight of 3 rows.*'down': \(2, 3\).*Leave 'gate' out"):
        gate_scores({"down": torch.zeros(2, 3)}, 4, 3)


@pytest.mark.parametrize("kind", ["residual", "mlp"])
def test_trained_scores_are_those_of_the_whole_network(trace: RoutingTrace, kind: str) -> None:
    predictor = random_predictor(kind=kind)
    judged, inputs = Trained(predictor), inputs_of(trace)
    with torch.inference_mode():
        wanted = predictor.scores(inputs)
        odds = predictor.log_odds(wanted)
    for layer_idx, lookahead in [(1, 1), (2, 1), (2, 2), (1, 2)]:
        source = max(0, layer_idx - lookahead)
        step = layer_idx - source - 1
        scores = judged.scores(trace, layer_idx, lookahead)
        assert scores is not None
        np.testing.assert_allclose(scores, wanted[source, step].numpy(), rtol=1e-4, atol=1e-4)
        some = np.arange(0, trace.num_tokens, 3)
        probabilities = judged.probabilities(scores[some], layer_idx, lookahead)
        np.testing.assert_allclose(probabilities, odds[source, step].sigmoid().numpy()[some], rtol=1e-4, atol=1e-4)


def test_only_residual_networks_look_across_tokens(trace: RoutingTrace) -> None:
    predictor = random_predictor()
    with torch.inference_mode():
        wanted = predictor.scores(inputs_of(trace))
    scores = Trained(predictor).next_token_scores(trace, 0, 2)  # layer 0 of the next token is 2 after layer 1
    np.testing.assert_allclose(scores, wanted[1, 1].numpy(), rtol=1e-4, atol=1e-4)
    assert Trained(random_predictor(kind="mlp")).next_token_scores(trace, 0, 2) is None


def test_what_a_predictor_was_not_trained_for_is_not_predicted(trace: RoutingTrace) -> None:
    short = Trained(random_predictor(lookahead=1))
    assert short.scores(trace, 1, 2) is not None  # at layer 0, one before
    assert short.scores(trace, 2, 2) is None
    paper = Trained(random_predictor(kind="promoe-paper"))
    assert paper.scores(trace, 2, 2) is not None
    assert paper.scores(trace, 2, 1) is None


def linear_trace(folder: Path) -> RoutingTrace:
    """The second layer's experts are linear in the first one's gate input, through a matrix that no gate has."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 12, 2, HIDDEN, generator=generator)
    matrix = torch.randn(HIDDEN, EXPERTS, generator=generator)
    chosen = (hidden[:, :, :1] @ matrix).topk(TOP_K).indices.expand(-1, -1, 2, -1)
    gates = [{"weight": torch.randn(EXPERTS, HIDDEN, generator=generator)} for _ in range(2)]
    return write_trace(folder, list(hidden), gates, list(chosen)).routing


@pytest.mark.parametrize("kind", [Linear, SklearnMlp])
def test_fitted_kinds_learn_what_there_is(kind: type[Linear | SklearnMlp], tmp_path: Path) -> None:
    fit, held_out = linear_trace(tmp_path).split()
    fitted = kind(fit)

    def accuracy() -> float:
        scores = fitted.scores(held_out, 1, 1)
        assert scores is not None
        needed = used(held_out, 1) > 0
        return np.count_nonzero(top(scores, TOP_K) & needed) / np.count_nonzero(needed)

    assert accuracy() > (0.8 if kind is Linear else 0.6) > TOP_K / EXPERTS
    assert accuracy() == accuracy()


def test_fitted_kinds_are_fitted_once_per_pair_on_so_many_tokens(
    trace: RoutingTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "LINEAR_TOKENS", 10)
    fits: list[int] = []

    class Counted(Linear):
        def _fit(self, inputs: np.ndarray, chosen: np.ndarray) -> object:
            fits.append(len(inputs))
            np.testing.assert_array_equal(inputs, inputs_of(trace)[self._tokens, 0].numpy())
            return super()._fit(inputs, chosen)

    kind = Counted(trace)
    kind.scores(trace, 1, 1)
    kind.scores(trace, 1, 2)
    kind.scores(trace, 2, 2)
    assert fits == [10, 10]


def test_the_network_of_scikit_learn_gives_probabilities(trace: RoutingTrace) -> None:
    kind = SklearnMlp(trace)
    scores = kind.scores(trace, 1, 1)
    assert scores is not None
    assert ((scores >= 0) & (scores <= 1)).all()
    assert kind.probabilities(scores, 1, 1) is scores
    assert Linear(trace).probabilities(scores, 1, 1) is None
