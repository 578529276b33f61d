from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from predictors.trained_predictors import HIDDEN, LAYERS, LOOKAHEAD, make
from promoe.errors import ConfigError
from promoe.predictors.trained import TRAINED_KINDS, TrainedConfig, TrainedPredictor, above_threshold
from promoe.scheduler.reuse import LearnedReuse


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_what_was_saved_is_loaded(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = make(kind)
    predictor.save_pretrained(tmp_path)
    again = TrainedPredictor.load(str(tmp_path))
    assert again.config == predictor.config
    x = torch.randn(3, LAYERS, HIDDEN)
    assert torch.equal(again.log_odds(again.scores(x)), predictor.log_odds(predictor.scores(x)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert capsys.readouterr().out == ""


def test_the_config_says_which_model_it_is_for(tmp_path: Path) -> None:
    make(base_revision="abc", versions={"promoe": "1"}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen2_moe"
    assert (config["base_model"], config["base_revision"], config["versions"]) == ("demo/model", "abc", {"promoe": "1"})
    assert [config[name] for name in ("num_layers", "num_experts", "top_k", "hidden_size", "lookahead")] == [
        4,
        8,
        2,
        16,
        3,
    ]


def learned() -> LearnedReuse:
    rng = np.random.default_rng(0)
    weights = np.array([0.25, 0.5, 0.75, 1.0], dtype=np.float32)
    return LearnedReuse(weights, rng.normal(size=(LAYERS, 8, 8)).astype(np.float32))


def test_a_reuse_prior_is_kept_with_it(tmp_path: Path) -> None:
    predictor = make()
    assert predictor.learned_reuse() is None
    predictor.keep_reuse(learned())
    predictor.save_pretrained(tmp_path)
    found = TrainedPredictor.load(str(tmp_path)).learned_reuse()
    assert found is not None
    np.testing.assert_array_equal(found.weights, learned().weights)
    np.testing.assert_array_equal(found.associations, learned().associations)


def test_a_predictor_from_before_there_was_a_reuse_prior_opens_without(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if not name.startswith("reuse_")}, path)
    assert TrainedPredictor.load(str(tmp_path)).learned_reuse() is None


def test_a_damaged_reuse_prior_is_refused() -> None:
    predictor = make()
    predictor.keep_reuse(learned()._replace(associations=np.full((LAYERS, 8, 8), np.nan, dtype=np.float32)))
    with pytest.raises(ConfigError, match="not all of its numbers are finite"):
        predictor.learned_reuse()


def test_what_reuse_is_foreseen_comes_with_its_weight_and_what_is_typical(tmp_path: Path) -> None:
    predictor = make(foresees_reuse=True)
    weights = np.array([0.25, 0.5, 0.75, 1.5, 1.0], dtype=np.float32)
    predictor.keep_reuse(learned()._replace(weights=weights))
    predictor.save_pretrained(tmp_path)
    opened = TrainedPredictor.load(str(tmp_path))
    found = opened.learned_reuse()
    assert found is not None
    np.testing.assert_array_equal(found.weights, weights)
    with torch.inference_mode():
        typical = opened.reuse_log_odds(opened.network.mean[None])[:, 0].numpy()
    assert found.foreseen is not None
    np.testing.assert_array_equal(found.foreseen, typical)
    assert np.ptp(typical) > 0


def test_damaged_networks_that_foresee_reuse_are_refused() -> None:
    predictor = make(foresees_reuse=True)
    predictor.reuse_weights.fill_(1.0)
    with torch.no_grad():
        predictor.network.bias[1, -1, 2] = float("inf")
    with pytest.raises(ConfigError, match="networks of the trained predictor are damaged"):
        predictor.learned_reuse()


@pytest.mark.parametrize("kind", ["mlp", "promoe-paper"])
def test_only_residual_foresees_reuse(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} foresees no reuse"):
        make(kind, foresees_reuse=True)


def test_which_pairs_are_predicted() -> None:
    pairs = {
        kind: {(i, k) for i in range(LAYERS) for k in range(1, 5) if make(kind).config.predicts(i, k)}
        for kind in TRAINED_KINDS
    }
    assert pairs["residual"] == {(i, k) for i in range(4) for k in (1, 2, 3)}  # on into the next token
    assert pairs["mlp"] == {(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)}
    assert pairs["promoe-paper"] == {(0, 1), (0, 2), (0, 3)}  # one distance, and what lies nearer from the first layer
    paper = make("promoe-paper", lookahead=2).config
    assert {(i, k) for i in range(LAYERS) for k in range(1, 5) if paper.predicts(i, k)} == {(0, 1), (0, 2), (1, 2)}


def test_above_threshold() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    assert above_threshold(scores, 2).tolist() == [[1.5, -0.5, 0.5, -1.5]]
    assert above_threshold(scores, 4).tolist() == [[3.0, 1.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "magic"}, "residual, mlp, promoe-paper. Got 'magic'"),
        ({"num_experts": 0}, "num_experts of a trained predictor must be a whole number from 1 to 2147483647. Got 0"),
        ({"top_k": "2"}, "top_k of a trained predictor must be a whole number from 1 to 2147483647. Got '2'"),
        ({"width": True}, "width"),
        ({"lookahead": 5}, "at most the number of MoE layers, 4. Got 5"),
    ],
)
def test_a_config_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="(?s).*" + message.replace(".", r"\.")):
        make(**changes)


def broken(folder: Path, how: str) -> Path:
    make().save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "config is no JSON":
        config.write_text("{")
    elif how == "config is a list":
        config.write_text("[]")
    elif how == "config without a field":
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "top_k"}))
    elif how == "other sizes":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 32}))
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "a tensor missing":
        tensors = load_file(weights)
        del tensors["slope"]
        save_file(tensors, weights)
    elif how == "a pickle":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    return folder


@pytest.mark.parametrize(
    "how",
    [
        "no config",
        "no weights",
        "config is no JSON",
        "config is a list",
        "config without a field",
        "other sizes",
        "truncated",
        "a tensor missing",
        "a pickle",
    ],
)
def test_a_folder_that_is_no_predictor(how: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="predictor"):
        TrainedPredictor.load(str(broken(tmp_path / "p", how)))


def test_a_place_where_nothing_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="There is no trained predictor"):
        TrainedPredictor.load(str(tmp_path / "nothing"))


def test_bfloat16_halves_the_file_and_opens_as_float32(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "a")
    make().to(torch.bfloat16).save_pretrained(tmp_path / "b")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"]
    assert sizes[1] < 0.6 * sizes[0]
    again = TrainedPredictor.load(str(tmp_path / "b"))
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert again.scores(torch.randn(2, LAYERS, HIDDEN)).shape == (LAYERS, LOOKAHEAD, 2, 8)


def test_config_is_plain() -> None:
    assert TrainedConfig(**{**make().config.__dict__}) == make().config


def test_a_predictor_in_the_hubs_cache(tmp_path: Path) -> None:
    """Weights and configuration are links into a folder of blobs; a pickle in their place is not even looked at."""
    repo = tmp_path / "models--org--predictor"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    make().save_pretrained(repo / "blobs")
    for file in (repo / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    assert TrainedPredictor.from_pretrained("org/predictor", **options).config == make().config
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(LocalEntryNotFoundError):
        TrainedPredictor.from_pretrained("org/predictor", **options)
