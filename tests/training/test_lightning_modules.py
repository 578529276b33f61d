from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from promoe.predictors.trained import TrainedConfig
from promoe.scheduler.reuse import HORIZON_VISITS
from promoe.training.lightning_modules import PredictorModule, TraceData, log_probabilities, new_predictor
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import TraceError
from training.learnable import EXPERTS, HIDDEN, LAYERS, TOP_K, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RecordedTrace:
    return RecordedTrace(write_trace(tmp_path_factory.mktemp("trace")))


def config(kind: str = "residual", lookahead: int = 2) -> TrainedConfig:
    return TrainedConfig(kind, "qwen2_moe", LAYERS, HIDDEN, EXPERTS, TOP_K, lookahead, 8)


def test_rows_are_divided_by_prompt(trace: RecordedTrace) -> None:
    data = TraceData(trace, batch_size=32)
    # Of 30 prompts of 20 tokens, the last 6 are kept out; of the 24, 2 validate.
    assert (len(data.training), len(data.validation)) == (22 * 20, 2 * 20)


def test_a_batch_has_this_token_and_the_next(trace: RecordedTrace) -> None:
    data = TraceData(trace, batch_size=32)
    for rows, start in ((data.training, 0), (data.validation, 440)):
        batch = rows.__getitems__([5, 19, 0])
        asked = start + np.array([5, 19, 0])
        assert torch.equal(batch.gate_inputs, trace.gate_inputs(asked))
        assert batch.has_next.tolist() == [1, 0, 1]  # the prompt's last token has none
        experts = trace.routing.experts
        for position, row in enumerate(asked):
            for layer_idx in range(LAYERS):
                now = batch.chosen[position, layer_idx].nonzero().flatten().tolist()
                assert now == sorted(experts[row, layer_idx].tolist())
                if batch.has_next[position]:
                    then = batch.chosen[position, LAYERS + layer_idx].nonzero().flatten().tolist()
                    assert then == sorted(experts[row + 1, layer_idx].tolist())
        assert torch.allclose(batch.gate.exp().sum(-1), torch.ones(3, 2 * LAYERS))


def test_a_batch_says_what_is_used_again_soon(trace: RecordedTrace) -> None:
    rows = TraceData(trace, batch_size=32).training
    batch, experts = rows.__getitems__([5, 16, 17, 19]), trace.routing.experts
    assert batch.has_horizon.tolist() == [1, 1, 0, 0]  # prompts of 20 tokens
    for position, row in ((0, 5), (1, 16)):
        for layer_idx in range(LAYERS):
            expected = {int(idx) for idx in experts[row + 1 : row + 1 + HORIZON_VISITS, layer_idx].ravel()}
            assert set(batch.reused[position, layer_idx].nonzero().flatten().tolist()) == expected


def test_reuse_is_trained_where_the_prompt_goes_on_for_long_enough(trace: RecordedTrace) -> None:
    data = TraceData(trace, 32)
    predictor = new_predictor(trace, data.training, replace(config(), foresees_reuse=True), seed=0)
    module = PredictorModule(predictor, "ce_kl", 1e-3, 0.0)
    for positions, is_trained in (([0, 5], True), ([17, 19], False)):
        batch = data.training.__getitems__(positions)
        predictor.zero_grad()
        module._mean_loss(batch, module._scored(batch)).backward()
        gradient = predictor.network.bias.grad
        assert gradient is not None
        assert bool(gradient[:, -1].any()) == is_trained
        assert gradient[:, :-1].any()


def test_every_training_row_is_seen_once_an_epoch_in_an_order_that_the_seed_and_epoch_give(
    trace: RecordedTrace,
) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = TraceData(trace, 32, seed).train_dataloader().sampler
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        return list(sampler)

    assert sorted(order(0, 0)) == list(range(440))
    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 10) for epoch in (0, 1)}) == 4


def test_too_few_tokens_or_prompts(trace: RecordedTrace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="440 tokens to train on, less than one batch of 512"):
        TraceData(trace, batch_size=512)
    with pytest.raises(TraceError, match="Collect more prompts"):
        TraceData(RecordedTrace(write_trace(tmp_path, prompts=2)), batch_size=8)


def test_log_probabilities_of_logits_and_of_probabilities() -> None:
    logits = torch.randn(4, 6)
    assert torch.equal(log_probabilities(logits), logits.log_softmax(-1))
    torch.testing.assert_close(log_probabilities(logits.softmax(-1)), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_a_new_residual_predictor_is_the_renormalised_gate(trace: RecordedTrace) -> None:
    data = TraceData(trace, 32)
    predictor = new_predictor(trace, data.training, config(), seed=0)
    x = trace.gate_inputs(slice(0, 440)).float()
    mean, deviation = x.mean(0), x.std(0)
    renormalised = (x[:, 0] - mean[0]) / deviation[0] * deviation[1] + mean[1]
    expected = renormalised @ trace.gates[1]["weight"].T
    torch.testing.assert_close(predictor.scores(x)[0, 0], expected, atol=1e-3, rtol=1e-3)
    again = new_predictor(trace, data.training, config(), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(predictor.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["residual", "mlp", "promoe-paper"])
def test_only_predicted_pairs_are_trained(kind: str, trace: RecordedTrace) -> None:
    data = TraceData(trace, 32)
    predictor = new_predictor(trace, data.training, config(kind), seed=0)
    module = PredictorModule(predictor, "bce", 1e-3, 0.0)
    batch = data.training.__getitems__([0, 19])
    scored = module._scored(batch)
    module._mean_loss(batch, scored).backward()
    gradient = predictor.network.bias.grad
    assert gradient is not None
    for i in range(LAYERS):
        for k in (1, 2):
            assert bool(gradient[i, k - 1].any()) == predictor.config.predicts(i, k)
            if i + k >= LAYERS:  # token 19 is its prompt's last
                assert scored.weight[i, k - 1].tolist() == ([1, 0] if kind == "residual" else [0, 0])


def test_targets_are_the_layers_ahead(trace: RecordedTrace) -> None:
    data = TraceData(trace, 32)
    module = PredictorModule(new_predictor(trace, data.training, config(), 0), "bce", 1e-3, 0.0)
    batch = data.training.__getitems__([3, 4])
    chosen = module._scored(batch).chosen
    for i in range(LAYERS):
        for k in (1, 2):
            assert torch.equal(chosen[i, k - 1], batch.chosen[:, i + k])
