"""What is checked before a model is run, and the models whose gates cannot be recorded."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MOE_FAMILIES, build
from torch import nn
from transformers import PreTrainedModel

from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers
from promoe.training import collect as collect_module
from promoe.training.collect import check_disk, describe, gate_width, save_gates, settings_of
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.trace_folder import TraceInfo, part_paths

from .collecting import (
    PROMPTS,
    TOKENIZER,
    options,
    record,
    tiny,
    writer_of,
)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


# -- before it starts -------------------------------------------------------------------------------------------


def has_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> list[Path]:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return shutil._ntuple_diskusage(1 << 50, 0, nbytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return asked


def info_of(model: PreTrainedModel) -> TraceInfo:
    return describe(model, find_moe_layers(model), "tiny", {})


def test_how_large_it_will_be(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = has_free(monkeypatch, 1 << 30)
    folder = tmp_path / "not" / "yet"
    row = 24 + 3 * (64 * 2 + 8 * 4 + 2 * 2)
    assert info_of(model).token_bytes == row
    said = check_disk(info_of(model), folder, options(max_tokens=20_000, num_shards=2))
    assert said == f"10,000 tokens of {row} B = {10_000 * row / 2**20:.1f} MiB into {folder} (1.00 GiB free)"
    assert asked == [tmp_path]
    assert not (tmp_path / "not").exists()


def test_a_disk_that_is_too_small(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, info = options(max_tokens=100_000), info_of(model)
    needed = (100_000 + 3 * 48) * info.token_bytes + (64 << 20)
    has_free(monkeypatch, needed)
    check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match=r"needs 100,000 tokens of 516 B = 49.2 MiB .* free\. Choose fewer --max-tok"):
        check_disk(info, tmp_path, chosen)


def test_what_is_there_needs_no_space(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(model, tmp_path)
    info, there = RecordedTrace(tmp_path).info, part_paths(tmp_path)[0].stat().st_size
    chosen = options(max_tokens=1000)
    needed = (1000 + 3 * 48) * info.token_bytes + (64 << 20) - there
    has_free(monkeypatch, needed)
    check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match="KiB are there"):
        check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, 0)
    check_disk(info, tmp_path, options(max_tokens=50))


def test_sequences_longer_than_the_model_knows_positions(tmp_path: Path) -> None:
    model = tiny(max_position_embeddings=48)
    record(model, tmp_path / "just", max_prompt_tokens=24)
    with pytest.raises(
        ConfigError, match=r"of 25 tokens .*, 50 in all, .* 48 positions\. Choose a smaller --max-prompt"
    ):
        record(model, tmp_path, max_prompt_tokens=25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1. Got 0"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens must be at least 1"),
        ({"batch_size": -1}, "--batch-size must be at least 1. Got -1"),
        ({"num_shards": 0}, "--num-shards must be at least 1"),
        ({"shard_index": 2, "num_shards": 2}, "--shard-index must be 0 to 1. Got 2"),
        ({"shard_index": -1}, "--shard-index must be 0 to 0"),
        ({"decode_share": 1.0}, r"--decode-share must be 0 to 0\.9. Got 1\.0"),
        ({"decode_share": -0.1}, "--decode-share must be"),
        ({"decode_share": float("nan")}, "--decode-share must be"),
        ({"temperature": 0.0}, "--temperature must be more than 0"),
        ({"temperature": float("nan")}, "--temperature must be more than 0"),
        ({"seed": -1}, r"--seed must be 0 to 2\^63 - 1"),
        ({"seed": 1 << 63}, "--seed must be"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_settings_say_what_must_stay_the_same() -> None:
    def settings(excluded: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
        return settings_of(options(**changes), excluded)

    assert settings(max_tokens=7, shard_index=1, num_shards=2) == settings(max_tokens=9, num_shards=2)
    assert settings()["excluded"] is None
    assert settings(["a", "b"]) == settings(["b", "a"]) != settings(["a", "c"])
    assert settings(["a", "b"])["excluded"].startswith("2 prompts, sha256 ")
    for name, value in {
        "decode_share": 0.1,
        "max_prompt_tokens": 3,
        "batch_size": 1,
        "temperature": 2.0,
        "seed": 5,
        "dtype": "float32",
        "data": "other",
    }.items():
        assert settings(**{name: value}) != settings()


# -- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_trace_says_what_it_is_of(family: str) -> None:
    model = tiny(family, hidden=96, num_experts=12, top_k=3)
    info = describe(model, find_moe_layers(model), "org/tiny", {"seed": 1})
    layers = 2 if family.startswith("deepseek") else 3
    assert (info.model, info.model_type, info.revision, info.settings) == ("org/tiny", family, None, {"seed": 1})
    assert (info.hidden_size, info.num_experts, info.top_k) == (96, [12] * layers, [3] * layers)
    assert set(info.versions) == {"promoe", "torch", "transformers"}


@pytest.mark.parametrize("harm", ["top_k", "weight", "width"])
def test_gates_that_cannot_be_described(model: PreTrainedModel, harm: str) -> None:
    layers = find_moe_layers(model)
    gate: Any = layers[1].gate
    if harm == "top_k":
        layers[1] = dataclasses.replace(layers[1], top_k=None)
    elif harm == "weight":
        gate.weight = nn.Parameter(torch.zeros(4, 64))
    else:
        gate.weight = nn.Parameter(torch.zeros(8, 32))
    with pytest.raises(UnsupportedModelError, match=r"gates of tiny cannot be recorded: .*Choose a model of another"):
        describe(model, layers, "tiny", {})


def test_a_gate_whose_weights_have_another_form_has_no_width(model: PreTrainedModel) -> None:
    layer = find_moe_layers(model)[0]
    assert gate_width(layer) == 64
    layer.gate.weight = nn.Parameter(torch.zeros(64))
    assert gate_width(layer) is None


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"returned token \d+, but the model has only 128 tokens: .*Put the model's own"
    ):
        record(build("qwen2_moe"), tmp_path)


def test_a_model_without_moe_layers(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="has no MoE layers"):
        collect_module.record(model, TOKENIZER, PROMPTS, writer_of(tiny(), tmp_path, options()), options())


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_gates_are_kept_with_their_biases(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    layers = find_moe_layers(model)
    record(model, tmp_path)
    save_gates(layers, tmp_path)
    gates = RecordedTrace(tmp_path).gates
    for layer, gate in zip(layers, gates, strict=True):
        state = layer.gate.state_dict()
        assert gate.keys() == state.keys() > {"weight"}
        assert all(torch.equal(gate[name], state[name]) for name in state)


def test_errors_are_promoes_own(model: PreTrainedModel, tmp_path: Path) -> None:
    raising: list[Callable[[], Any]] = [
        lambda: record(model, tmp_path, shard_index=2, num_shards=9),
        lambda: record(tiny(max_position_embeddings=8), tmp_path / "b"),
    ]
    for action in raising:
        with pytest.raises(PromoeError):
            action()
