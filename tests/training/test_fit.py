from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until

from promoe.errors import ConfigError
from promoe.predictors.trained import TRAINED_KINDS, TrainedConfig, TrainedPredictor
from promoe.training import cli
from promoe.training.fit import calibrate, default_width, fit
from promoe.training.lightning_modules import TraceData, new_predictor
from promoe.training.losses import LOSSES
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.reuse import fit_reuse
from promoe.training.routing_traces import TraceError
from training.learnable import EXPERTS, HIDDEN, LAYERS, TOP_K, make_fit, settings_of, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace"))


def accuracy(predictor: TrainedPredictor, trace: RecordedTrace, layer_idx: int, steps_ahead: int) -> float:
    """On the prompts kept out."""
    rows = np.arange(480, 600)
    scores = predictor.scores(trace.gate_inputs(rows))[layer_idx, steps_ahead - 1]
    predicted = scores.topk(TOP_K).indices.numpy()
    used = trace.routing.experts[rows, layer_idx + steps_ahead]
    return float(
        np.mean([len(set(a) & set(b)) / TOP_K for a, b in zip(predicted.tolist(), used.tolist(), strict=True)])
    )


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_what_is_fitted_predicts_better_than_it_began(
    kind: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(make_fit(trace, tmp_path, max_epochs=12, kind=kind))
    predictor = TrainedPredictor.load(str(tmp_path / "predictor"))
    assert predictor.config.base_model == "demo/model"
    assert predictor.config.kind == kind
    assert f"{kind} of " in capsys.readouterr().out
    recorded = RecordedTrace(trace)
    new = new_predictor(recorded, TraceData(recorded, 32).training, predictor.config, 0)
    for layer_idx, steps_ahead in ((0, 1), (0, 2)):
        assert (
            accuracy(predictor, recorded, layer_idx, steps_ahead)
            > accuracy(new, recorded, layer_idx, steps_ahead) + 0.05
        )


def test_the_reuse_prior_learns_from_the_prompts_that_are_fitted_on(trace: Path, tmp_path: Path) -> None:
    fit(make_fit(trace, tmp_path, max_epochs=1))
    found = TrainedPredictor.load(str(tmp_path / "predictor")).learned_reuse()
    assert found is not None
    predictor = TrainedPredictor.load(str(tmp_path / "predictor"))
    expected = fit_reuse(RecordedTrace(trace).routing.split()[0], predictor=predictor)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=0.01)  # kept in bf16
    np.testing.assert_allclose(found.associations, expected.associations, rtol=0.01)
    assert found.associations.any()
    assert found.foreseen is not None
    assert found.weights.shape == (5,)


def test_kinds_as_published_foresee_no_reuse(trace: Path, tmp_path: Path) -> None:
    fit(make_fit(trace, tmp_path, max_epochs=1, kind="mlp"))
    found = TrainedPredictor.load(str(tmp_path / "predictor")).learned_reuse()
    assert found is not None
    assert found.foreseen is None
    assert found.weights.shape == (4,)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(loss: str, trace: Path, tmp_path: Path) -> None:
    fit(make_fit(trace, tmp_path, max_epochs=6, loss=loss))
    recorded = RecordedTrace(trace)
    predictor = TrainedPredictor.load(str(tmp_path / "predictor"))
    new = new_predictor(recorded, TraceData(recorded, 32).training, predictor.config, 0)
    assert accuracy(predictor, recorded, 0, 1) > accuracy(new, recorded, 0, 1) + 0.05


def test_a_run_that_ended_is_not_trained_again(trace: Path, tmp_path: Path) -> None:
    fit(make_fit(trace, tmp_path))
    weights = (tmp_path / "predictor" / "model.safetensors").read_bytes()
    fit(make_fit(trace, tmp_path))
    assert (tmp_path / "predictor" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(trace: Path, tmp_path: Path) -> None:
    epochs = 40
    options = [
        "fit", "--trace", str(trace), "--out", str(tmp_path / "killed"), "--lookahead", "2", "--width", "8",
        "--learning-rate", "5e-3", "--batch-size", "32", "--patience", "100", "--trainer.max_epochs", str(epochs),
        "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "promoe.training.cli", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    try:
        until(lambda: last.exists() or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    assert last.exists()
    done = torch.load(last, weights_only=True)["epoch"] + 1
    assert done < epochs, "it was over before it could be killed"
    assert not (tmp_path / "killed" / "predictor").exists()

    same: dict[str, Any] = {"max_epochs": epochs, "patience": 100}
    fit(make_fit(trace, tmp_path / "killed", **same))
    fit(make_fit(trace, tmp_path / "whole", **same))
    found, wanted = (TrainedPredictor.load(str(tmp_path / name / "predictor")) for name in ("killed", "whole"))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.slow
def test_two_processes_train_one_predictor(trace: Path, tmp_path: Path) -> None:
    options = [
        "fit", "--trace", str(trace), "--out", str(tmp_path), "--lookahead", "2", "--width", "8", "--batch-size", "32",
        "--trainer.max_epochs", "4", "--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "promoe.training.cli", *options], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("residual of ") == 1  # one of them answers
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    # 440 rows: each process takes 6 batches of 32 from its half, and all of them were steps of one optimiser.
    assert state["global_step"] == 4 * 6
    recorded = RecordedTrace(trace)
    predictor = TrainedPredictor.load(str(tmp_path / "predictor"))
    new = new_predictor(recorded, TraceData(recorded, 32).training, predictor.config, 0)
    assert accuracy(predictor, recorded, 0, 1) > accuracy(new, recorded, 0, 1)


@pytest.mark.parametrize(("name", "value"), [("kind", "mlp"), ("lookahead", 1), ("seed", 3), ("loss", "bce")])
def test_a_folder_with_another_run_is_left_alone(name: str, value: Any, trace: Path, tmp_path: Path) -> None:
    fit(make_fit(trace, tmp_path, max_epochs=1))
    before = settings_of(tmp_path)
    with pytest.raises(ConfigError, match=f"holds a run with {name} = .*, and {value!r} was asked for"):
        fit(make_fit(trace, tmp_path, **{"max_epochs": 1, name: value}))
    assert settings_of(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "gate"}, "--kind must be of residual, mlp, promoe-paper. Got 'gate'"),
        ({"loss": "mse"}, "--loss must be of bce, kl, ce_kl, ranking. Got 'mse'"),
        ({"lookahead": 0}, "--lookahead must be at least 1. Got 0"),
        ({"batch_size": 0}, "--batch-size must be at least 1. Got 0"),
        ({"width": 0}, "--width must be at least 1. Got 0"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], message: str, trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_fit(trace, tmp_path, **changes)
    assert message in str(caught.value)


def test_traces_that_cannot_be_fitted_on(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no recorded trace"):
        fit(make_fit(tmp_path / "nowhere", tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"at most the number of MoE layers, 3\. Got 4"):
        fit(make_fit(trace, tmp_path / "run", lookahead=4))
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        fit(make_fit(trace, tmp_path / "file"))


def test_a_mistake_on_the_command_line(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--trace", str(trace), "--out", str(tmp_path / "run"), "--batch-size", "100000"]) == 2
    assert "less than one batch of 100,000" in capsys.readouterr().err


def test_calibrated_probabilities_are_shares(trace: Path) -> None:
    """Of what is given about p, a share of about p is used."""
    recorded = RecordedTrace(trace)
    rows = TraceData(recorded, 32).training
    predictor = new_predictor(
        recorded, rows, TrainedConfig("residual", "qwen2_moe", LAYERS, HIDDEN, EXPERTS, TOP_K, 2, 8), 0
    )
    calibrate(predictor, rows)
    batch = rows.__getitems__(list(range(len(rows))))
    with torch.inference_mode():
        probability = torch.sigmoid(predictor.log_odds(predictor.scores(batch.gate_inputs)))[0, 0]
    used = batch.chosen[:, 1]
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0)):
        within = (probability >= low) & (probability < high)
        assert int(within.sum()) > 20
        assert abs(float(used[within].mean()) - float(probability[within].mean())) < 0.1


def test_widths_follow_the_hidden_size() -> None:
    assert (default_width("mlp", 2048), default_width("residual", 2048)) == (1024, 128)
    assert (default_width("mlp", 16), default_width("residual", 16)) == (32, 32)
