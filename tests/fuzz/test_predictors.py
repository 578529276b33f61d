"""Folders of trained predictors: configurations and weights of any kind; and that no answer of one can harm a scheduler."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from predictors.trained_predictors import make
from safetensors.torch import load_file, save
from tiny_checkpoint import write_checkpoint
from tiny_models import token_ids

import promoe
from promoe.errors import ConfigError
from promoe.predictors.trained import CONFIG_FILE, WEIGHTS_FILE, TrainedPredictor

from .inputs import fuzzed, outcome
from .mutations import DEEP, VALUES, damaged, json_bytes

SIZES = {"num_layers": 2, "hidden_size": 4, "num_experts": 4, "lookahead": 1, "width": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "predictor"
    make(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return values


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, torch.Tensor]:
    # Not the file's own memory: the tests write over it.
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}


def check_folder(target: str, folder: Path, config: bytes, weights: bytes, truth: dict[str, torch.Tensor]) -> None:
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    predictor = outcome(target, lambda: TrainedPredictor.load(str(folder)))
    if predictor is None:
        return
    state = predictor.state_dict()
    assert sum(tensor.nbytes for tensor in state.values()) < 2**20
    assert all(tensor.isfinite().all() for tensor in state.values())
    outcome(f"{target}, its reuse prior", predictor.learned_reuse)
    if target == "predictor: configuration":
        assert all(torch.equal(state[name], tensor) for name, tensor in truth.items())
    sizes = predictor.config
    scores = predictor.scores(torch.ones(1, sizes.num_layers, sizes.hidden_size))
    assert scores.shape == (sizes.num_layers, sizes.lookahead, 1, sizes.num_experts)
    assert predictor.log_odds(scores).shape == scores.shape


@fuzzed(100)
@given(data=st.data())
def test_configurations(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    content = data.draw(json_bytes(config, VALUES | st.sampled_from(("mlp", "promoe-paper", "residual"))))
    check_folder("predictor: configuration", folder, content, save(weights), weights)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 10**9},
        {"width": 2**62},
        {"hidden_size": 10**400},
        {"num_experts": 2**31, "num_layers": 2**31},
        {"lookahead": 10**9, "num_layers": 10**9},
        {"kind": ["mlp"]},
        {"base_model": 3},
        {"versions": 7},
        {"model_type": {}},
        {"base_revision": []},
    ],
)
def test_configurations_of_other_sizes(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], change: dict[str, Any]
) -> None:
    """Refused by the header of the weights, before memory is taken for such networks."""
    (folder / WEIGHTS_FILE).write_bytes(save(weights))
    (folder / CONFIG_FILE).write_text(
        json.dumps(config | {"config": {**config.get("config", config), **change}} | change)
    )
    with pytest.raises(ConfigError):
        TrainedPredictor.load(str(folder))


def test_a_configuration_of_any_depth(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    (folder / WEIGHTS_FILE).write_bytes(save(weights))
    (folder / CONFIG_FILE).write_bytes(b'{"kind": ' + b"[" * DEEP)
    with pytest.raises(ConfigError, match="nested too deeply"):
        TrainedPredictor.load(str(folder))


dtypes = st.sampled_from(
    (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
)
numbers = st.floats(-9, 9, width=32) | st.sampled_from(
    (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, 0.0, 1e30)
)


@st.composite
def changed_weights(draw: st.DrawFn, weights: dict[str, torch.Tensor]) -> bytes:
    """Some tensors in another dtype or shape, with other numbers, dropped, renamed, or more of them."""
    result = dict(weights)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(result)))
        tensor = result.pop(name)
        how = draw(st.sampled_from((4, 4, 4, 4, 0, 0, 1, 2, 3, 5)))
        if how == 0:
            real = tensor.real if tensor.is_complex() else tensor
            result[name] = real.to(torch.float32).to(draw(dtypes))
        elif how == 1:
            result[name] = torch.zeros(draw(st.lists(st.integers(0, 5), max_size=5)))
        elif how == 2:
            result[draw(st.text(max_size=8).filter(lambda text: text.isprintable())) or "x"] = tensor
        elif how == 3:
            result[name], result["more"] = tensor, torch.zeros(2)
        elif how == 4:
            tensor = tensor.clone()
            if tensor.numel():
                whole = not (tensor.is_floating_point() or tensor.is_complex())
                value = draw(st.integers(0, 1) if whole else numbers)
                tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
            result[name] = tensor
        if not result:
            break
    content = save({name: tensor.contiguous() for name, tensor in result.items()})
    return draw(damaged(content)) if draw(st.integers(0, 3)) == 0 else content


@fuzzed(100)
@given(data=st.data())
def test_weights(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], data: st.DataObject) -> None:
    check_folder(
        "predictor: weights", folder, json.dumps(config).encode(), data.draw(changed_weights(weights)), weights
    )


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "pytorch_model.bin"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    make(**SIZES).save_pretrained(tmp_path / "predictor")
    (tmp_path / "predictor" / WEIGHTS_FILE).unlink()
    (tmp_path / "predictor" / name).write_bytes(pickle.dumps(Marker(tmp_path / "ran")))
    with pytest.raises(ConfigError):
        TrainedPredictor.load(str(tmp_path / "predictor"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    make(**SIZES).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"has no {name}"):
        TrainedPredictor.load(str(tmp_path))


@fuzzed(60)
@given(
    name=st.sampled_from(
        ("a/b", "a\0b/c", "/" * 3000, "x/" * 3000, "../..", "\ud800/x", "/dev/null", "a/b/c", "~/x", "/etc/passwd")
    )
    | st.text(max_size=6).map(lambda text: f"{text}/x")
)
@example(name="x" * 5000 + "/y")
def test_names(name: str) -> None:
    outcome("predictor: names", lambda: TrainedPredictor.load(name))


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45, 1e30])
@pytest.mark.parametrize("kind", ["residual", "mlp", "promoe-paper"])
def test_whatever_it_answers_the_logits_are_the_same(tmp_path: Path, kind: str, value: float) -> None:
    """Finite weights whose products are not: a prediction may be worthless, and must not be more than that."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", layers=2)
    predictor = make(kind, num_layers=2, hidden_size=64, num_experts=8, lookahead=1, width=3)
    with torch.no_grad():
        predictor.network.inner.fill_(value)
        predictor.network.outer.fill_(value)
        predictor.slope.fill_(value)
    predictor.save_pretrained(tmp_path / "predictor")
    ids = token_ids(length=5)
    logits = []
    for chosen in (None, str(tmp_path / "predictor")):
        model = promoe.from_pretrained(checkpoint, cache="50%", predictor=chosen)
        with torch.inference_mode():
            logits.append([model(ids).logits, *(model(ids[:, :1]).logits for _ in range(4))])
        model.promoe.close()
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)
