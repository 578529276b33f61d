from __future__ import annotations

import pytest
import torch

from predictors.trained_predictors import EXPERTS, HIDDEN, LAYERS, LOOKAHEAD, make
from promoe.predictors.network import MlpNetwork, ResidualNetwork


@pytest.mark.parametrize("kind", ["residual", "mlp"])
def test_scores_of_all_layers_and_distances(kind: str) -> None:
    scores = make(kind).scores(torch.randn(5, LAYERS, HIDDEN))
    assert scores.shape == (LAYERS, LOOKAHEAD, 5, EXPERTS)


def test_what_residual_computes() -> None:
    network = make("residual").network
    x = torch.randn(3, LAYERS, HIDDEN)
    scores = network(x)
    for i in range(LAYERS):
        z = (x[:, i] - network.mean[i]) * network.scale[i]
        inner = z @ network.inner[i].T + network.inner_bias[i]
        trunk = inner[:, : network.width].relu()
        for k in range(LOOKAHEAD):
            linear = inner[:, network.width + k * EXPERTS : network.width + (k + 1) * EXPERTS]
            expected = linear + trunk @ network.outer[i, k].T + network.bias[i, k]
            torch.testing.assert_close(scores[i, k], expected)


def test_what_mlp_computes() -> None:
    network = make("mlp").network
    x = torch.randn(3, LAYERS, HIDDEN)
    scores = network(x)
    for i in range(LAYERS):
        z = (x[:, i] - network.mean[i]) * network.scale[i]
        inner = (z @ network.inner[i].T + network.inner_bias[i]).relu()
        for k in range(LOOKAHEAD):
            hidden = inner[:, k * network.width : (k + 1) * network.width]
            torch.testing.assert_close(scores[i, k], hidden @ network.outer[i, k].T + network.bias[i, k])


def started(foresees_reuse: bool = False) -> tuple[ResidualNetwork, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A network that has learned nothing yet, and the means, deviations and gates that it starts from."""
    network = ResidualNetwork(LAYERS, HIDDEN, EXPERTS, LOOKAHEAD, 8, foresees_reuse)
    mean, deviation = torch.randn(LAYERS, HIDDEN), torch.rand(LAYERS, HIDDEN) + 0.5
    gates = [torch.randn(EXPERTS, HIDDEN) for _ in range(LAYERS)]
    network.standardise(mean, deviation)
    network.start_from_gates(gates)
    return network, mean, deviation, gates


def test_residual_starts_as_the_targets_gate_on_inputs_of_that_layers_mean_and_deviation() -> None:
    network, mean, deviation, gates = started()
    x = torch.randn(6, LAYERS, HIDDEN)
    scores = network(x)
    for i in range(LAYERS):
        for k in range(1, LOOKAHEAD + 1):
            j = (i + k) % LAYERS
            renormalised = (x[:, i] - mean[i]) / deviation[i] * deviation[j] + mean[j]
            torch.testing.assert_close(scores[i, k - 1], renormalised @ gates[j].T, atol=1e-4, rtol=1e-4)


def test_reuse_is_one_more_head_that_starts_as_the_layers_own_gate() -> None:
    network, _, _, gates = started(foresees_reuse=True)
    x = torch.randn(6, LAYERS, HIDDEN)
    heads = network(x)
    assert heads.shape == (LAYERS, LOOKAHEAD + 1, 6, EXPERTS)
    for i in range(LAYERS):
        torch.testing.assert_close(heads[i, -1], x[:, i] @ gates[i].T, atol=1e-4, rtol=1e-4)


def test_an_mlp_starts_with_something_to_learn_from() -> None:
    network = MlpNetwork(LAYERS, HIDDEN, EXPERTS, LOOKAHEAD, 8)
    network(torch.randn(6, LAYERS, HIDDEN)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())


@pytest.mark.parametrize("steps", [[0], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("kind", ["residual", "mlp"])
def test_folded_weights_take_raw_inputs(kind: str, steps: list[int]) -> None:
    network = make(kind).network
    x = torch.randn(3, LAYERS, HIDDEN)
    inner = torch.stack([(x[:, i] - network.mean[i]) * network.scale[i] @ network.inner[i].T for i in range(LAYERS)])
    inner = inner + network.inner_bias[:, None]
    for i in range(LAYERS):
        weight, bias = network.folded(i, steps)
        shared, each = network.num_shared_rows(), network.num_step_rows()
        wanted = [inner[i, :, :shared], *(inner[i, :, shared + k * each : shared + (k + 1) * each] for k in steps)]
        torch.testing.assert_close(x[:, i] @ weight.T + bias, torch.cat(wanted, dim=1), atol=1e-4, rtol=1e-4)
