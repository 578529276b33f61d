"""Kinds by name and by folder: what is refused, and what it is called in the results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from promoe.errors import ConfigError
from promoe.training.baselines import Token
from promoe.training.hidden_states import Gate, Trained
from promoe.training.kinds import UnknownKindError, check_kinds, note_on_training, prepare
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import RoutingTrace, TraceError

from . import traces
from .hidden_traces import random_predictor, random_trace, save_run


@pytest.fixture
def trace(tmp_path: Path) -> RoutingTrace:
    return random_trace(tmp_path / "trace").routing


def prepared(names: list[str], trace: RoutingTrace) -> dict[str, Any]:
    return {name: fitting() for name, fitting in prepare(names, trace, trace.split()[0]).items()}


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    check_kinds(["token", "gate"])
    with pytest.raises(
        UnknownKindError, match=r"no kind 'gates', nor a folder.*token, .*sklearn-mlp, or give the folder"
    ):
        check_kinds(["token", "gates"])
    with pytest.raises(
        UnknownKindError, match=r"holds no trained predictor: neither config\.json nor predictor/config"
    ):
        check_kinds([str(tmp_path)])


@pytest.mark.parametrize("name", ["gate", "linear", "sklearn-mlp"])
def test_a_trace_of_ids_is_not_enough_for_some(name: str) -> None:
    trace = traces.random_trace()
    with pytest.raises(TraceError, match=f"kind '{name}' predicts from hidden states.*promoe-train collect"):
        prepare(["token", name], trace, trace)


def test_nor_for_a_trained_predictor(tmp_path: Path) -> None:
    run, trace = save_run(tmp_path / "run"), traces.random_trace()
    with pytest.raises(TraceError, match=r"run' predicts from hidden states"):
        prepare([str(run)], trace, trace)


def test_kinds_keep_their_names_and_order(trace: RoutingTrace, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    kinds = prepared(["gate", str(run), "token", "token"], trace)
    assert {name: type(kind) for name, kind in kinds.items()} == {"gate": Gate, "residual": Trained, "token": Token}
    assert list(kinds) == ["gate", "residual", "token"]


def test_a_second_predictor_of_a_kind_is_told_apart(trace: RoutingTrace, tmp_path: Path) -> None:
    first, second, third = (save_run(tmp_path / name / "run", seed) for seed, name in enumerate("abc"))
    other = save_run(tmp_path / "other", kind="mlp")
    names = [str(first), str(second / "predictor"), str(third), str(other)]
    assert list(prepared(names, trace)) == ["residual", "residual (run)", str(third), "mlp"]


def test_an_exported_predictor_is_a_folder_too(trace: RoutingTrace, tmp_path: Path, monkeypatch: Any) -> None:
    random_predictor().save_pretrained(tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    assert list(prepared(["exported"], trace)) == ["residual"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "expected model_type = 'qwen2_moe', found 'mixtral'"),
        ({"num_layers": 4}, "expected num_layers = 3, found 4"),
        ({"hidden_size": 8}, "expected hidden_size = 6, found 8"),
        ({"num_experts": 8}, "expected num_experts = 5, found 8"),
        ({"top_k": 1}, "expected top_k = 2, found 1"),
    ],
)
def test_a_predictor_for_another_model_is_refused(
    changes: dict[str, Any], message: str, trace: RoutingTrace, tmp_path: Path
) -> None:
    run = save_run(tmp_path / "run", **changes, base_model="org/other")
    with pytest.raises(
        ConfigError, match=f"does not fit the trace .*trace: {message}.*org/other.*trained for org/model"
    ):
        prepare([str(run)], trace, trace)


def test_a_damaged_predictor_is_refused(trace: RoutingTrace, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    os.truncate(run / "predictor" / "model.safetensors", 10)
    with pytest.raises(ConfigError, match="is not a trained predictor"):
        prepare([str(run)], trace, trace)


def test_a_run_on_a_trace_that_has_grown_is_noted(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace").routing
    assert isinstance(trace.recorded, RecordedTrace)
    same, other = save_run(tmp_path / "a", num_tokens=80), save_run(tmp_path / "b", num_tokens=79)
    assert note_on_training(str(same), trace) is None
    assert note_on_training(str(tmp_path / "trace"), trace) is None
    note = note_on_training(str(other), trace)
    assert note is not None
    assert "trained on a trace of 79 tokens, this one has 80" in note
