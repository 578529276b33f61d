"""`promoe simulate`, as it is called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_checkpoints import write_fp8
from tiny_models import build

from promoe.cli import main
from promoe.commands.simulate import command
from promoe.commands.simulate.command import read_geometry
from promoe.commands.simulate.machine import geometry_of
from promoe.errors import CheckpointError, ConfigError
from promoe.experts.moe_layers import find_moe_layers
from training import recordings

from .traces import EXPERTS, save, topics

KEYS = (
    *("policy", "cache_rate", "tokens", "misses_per_token", "hit_rate", "ready_rate"),
    *("bytes_per_token", "wasted_bytes_per_token", "tpot_s", "bound_s"),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(topics(), tmp_path_factory.mktemp("trace") / "trace.npz")


def simulate(trace: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["simulate", "--trace", str(trace), "--cache", "25%", "--json", str(out), *more]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "static", "next_use", "belady", "default"])
def test_every_policy_writes_every_figure(policy: str, trace: Path, tmp_path: Path) -> None:
    found = simulate(trace, tmp_path, "--policy", policy)
    assert [key for key in KEYS if found.get(key) is None] == []
    assert (found["policy"], found["cache_rate"], found["tokens"]) == (policy, 0.25, 480)


def test_what_is_printed_says_on_what_and_how_far_from_the_bound(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulate(trace, tmp_path, "--hardware", "laptop-ssd")
    printed = capsys.readouterr().out
    assert (
        "an unknown model with experts of 16 MiB (assumed; see --model) on laptop CPU, NVMe SSD; 480 tokens of 12"
        in printed
    )
    assert "16 slots of 16.8 MB, shared by all layers" in printed
    assert f"{found['tpot_s'] / found['bound_s']:.2f}x that" in printed


def test_sizes_of_a_model_of_ones_own(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its config.json alone; one that does not fit the trace is refused."""
    routing = topics()
    model = build("qwen2_moe", num_experts=EXPERTS, layers=routing.num_layers, top_k=routing.top_k, intermediate=96)
    model.config.save_pretrained(tmp_path / "model")
    found = simulate(trace, tmp_path, "--model", str(tmp_path / "model"))
    assert found["expert_bytes"] == 2 * 3 * 96 * 64, "bf16, as is assumed where a configuration does not say"
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'model'} on RTX 4090")
    build("qwen2_moe", layers=2).config.save_pretrained(tmp_path / "other")
    arguments = ["simulate", "--trace", str(trace), "--model"]
    for name, why in (
        (str(tmp_path / "other"), "The trace is not of"),
        ("nothing", "There is no model preset 'nothing'"),
        (str(tmp_path / "nothing"), "There is no folder"),
    ):
        assert main([*arguments, name]) == 2
        assert why in capsys.readouterr().err


def test_a_recorded_trace_says_of_which_model_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    sizes = {"num_experts": recordings.EXPERTS, "layers": recordings.LAYERS, "top_k": recordings.TOP_K}
    build("qwen2_moe", **sizes, intermediate=96).config.save_pretrained(folder)
    rows = [[recordings.make_rows(prompt, 12, 8) for prompt in range(6)]]
    here = recordings.write(tmp_path / "here", rows, recordings.make_info(model=str(folder)))
    assert simulate(here, tmp_path)["expert_bytes"] == 2 * 3 * 96 * 64
    assert capsys.readouterr().out.startswith(f"{folder} on RTX 4090")
    elsewhere = recordings.write(tmp_path / "elsewhere", rows, recordings.make_info(model=str(tmp_path / "gone")))
    assert simulate(elsewhere, tmp_path)["expert_bytes"] == 16 * 2**20
    assert simulate(here, tmp_path, "--model", "auto", "--bits", "8")["expert_bytes"] == 3 * 96 * 64


def test_the_same_command_writes_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert simulate(trace, tmp_path, "--predictor", "oracle") == simulate(
        trace, tmp_path / "b", "--predictor", "oracle"
    )


def test_a_predictor_is_fitted_on_other_prompts(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulate(trace, tmp_path, "--predictor", "token", "--max-tokens", "100")
    assert found["tokens"] == 100
    assert found["prefetched_bytes_per_token"] > 0
    assert "fitted on the first 70% of the prompts" in capsys.readouterr().out
    other = save(topics(seed=3), tmp_path / "other.npz")
    assert simulate(trace, tmp_path, "--predictor", "token", "--fit", str(other))["tokens"] == 480


def test_static_says_that_it_knows_what_comes(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(trace, tmp_path, "--policy", "static")
    assert "--fit FILE for an honest one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cache", "6GiB"], "--cache must be a share of the routed experts, such as 25%. Got '6GiB'"),
        (["--cache", "1%"], "less than one slot"),
        (["--hardware", "abacus"], "no hardware preset 'abacus'"),
        (["--model", "mixtral-8x7b"], "expected 32 MoE layers of 8 experts, top 2; found 4 of 16, top 3"),
        (["--predictor", "gate"], "needs hidden states"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--bits", "0"], "--bits must be more than 0 and at most 64"),
        (["--batch", "0"], "--batch must be at least 1"),
    ],
)
def test_mistakes_are_answered(more: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(trace), *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "belady"])
def test_a_fit_that_nothing_is_fitted_on(policy: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(trace), "--policy", policy, "--fit", str(trace)]) == 2
    assert f"--policy {policy} without a predictor is fitted on nothing" in capsys.readouterr().err


def test_batches_and_bits(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number, more in enumerate((["--batch", "1"], ["--batch", "2", "--bits", "4"])):
        out = tmp_path / f"{number}.json"
        assert main(["simulate", "--trace", str(trace), *more, "--json", str(out)]) == 0
        found.append(json.loads(out.read_text()))
    assert "2 sequences at a time" in capsys.readouterr().out
    plain, other = found
    assert other["expert_bytes"] == plain["expert_bytes"] // 4
    assert (plain["sequences_per_pass"], other["sequences_per_pass"]) == (1.0, 2.0)


def test_a_fit_of_another_model_is_refused(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = topics()
    path = save(two, tmp_path / "two.npz", experts=two.experts[:, :2] % EXPERTS)
    assert main(["simulate", "--trace", str(trace), "--policy", "static", "--fit", str(path)]) == 2
    assert "is of another model: 2 MoE layers, top 3, but the trace has 4, top 3" in capsys.readouterr().err
    path = save(two, tmp_path / "more.npz", experts=two.experts + 5)
    assert main(["simulate", "--trace", str(trace), "--policy", "static", "--fit", str(path)]) == 2
    assert "experts up to 21 where it has 16" in capsys.readouterr().err


def test_a_missing_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(tmp_path / "none.npz")]) == 2
    assert "none.npz" in capsys.readouterr().err


def test_experts_that_were_never_used_still_have_slots_by_the_models_sizes(tmp_path: Path) -> None:
    """A trace of a model whose last experts nobody chose: slots go by the model, not by the largest id."""
    rng = np.random.default_rng(0)
    rows = np.stack([[rng.permutation(31)[:4] for _ in range(24)] for _ in range(5)])
    path = save(topics(), tmp_path / "trace.npz", experts=rows, prompt_lengths=np.array([5]), token_index=np.arange(5))
    found = simulate(path, tmp_path)
    assert found["model"] == "gpt-oss-20b"
    assert found["slots"] == 24 * 8


def test_the_default_can_be_told_what_follows_what(trace: Path, tmp_path: Path) -> None:
    other = save(topics(prompts=60), tmp_path / "other.npz")
    half = ("--cache", "50%")
    told = simulate(trace, tmp_path, "--fit", str(other), *half)["misses_per_token"]
    assert told < 0.95 * simulate(trace, tmp_path, *half)["misses_per_token"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_weights", [True, False])
def test_sizes_are_those_of_the_model(tied: bool, with_weights: bool, tmp_path: Path) -> None:
    model = build("qwen2_moe", dtype=torch.bfloat16, tie_word_embeddings=tied)
    (model if with_weights else model.config).save_pretrained(tmp_path)
    layers = find_moe_layers(model)
    found = read_geometry(str(tmp_path))
    assert (found.num_layers, found.num_experts, found.top_k) == (len(layers), 8, layers[0].top_k)
    assert found.expert_bytes == layers[0].layout.payload_bytes
    experts = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert found.expert_parameters * found.num_experts * found.num_layers == experts
    # A row of the table is read for a token, all of the head.
    table = model.get_input_embeddings().weight.numel()
    buffers = sum(buffer.numel() for buffer in model.buffers())
    others = sum(parameter.numel() for parameter in model.parameters()) - experts
    assert found.other_parameters == others + buffers - (0 if tied else table)


def test_experts_are_as_large_as_in_the_files(tmp_path: Path) -> None:
    write_fp8(tmp_path)
    found = read_geometry(str(tmp_path))
    assert 8 < found.bits_per_weight < 16


def test_a_trace_must_be_of_the_model(tmp_path: Path) -> None:
    build("qwen2_moe").config.save_pretrained(tmp_path)
    found = read_geometry(str(tmp_path))
    sizes = {"num_layers": found.num_layers, "num_experts": found.num_experts, "top_k": found.top_k}
    assert geometry_of(found, **sizes) is found
    assert geometry_of(found, **sizes | {"num_experts": 2}) is found, "experts that were never used leave no trace"
    for other in ({"num_layers": 7}, {"num_experts": 9}, {"top_k": 1}):
        with pytest.raises(ConfigError, match=r"The trace is not of .*: expected 3 MoE layers of 8 experts"):
            geometry_of(found, **sizes | other)


def test_layers_of_several_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen2_moe").config.save_pretrained(tmp_path)
    read_model = command.read_model

    def of_two_sizes(path: str) -> Any:
        read = read_model(path)
        first, *others = read.sizes.layers
        layers = (dataclasses.replace(first, top_k=first.top_k + 1), *others)
        return dataclasses.replace(read, sizes=dataclasses.replace(read.sizes, layers=layers))

    monkeypatch.setattr(command, "read_model", of_two_sizes)
    with pytest.raises(ConfigError, match="not all of one size"):
        read_geometry(str(tmp_path))
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_geometry(str(tmp_path / "none"))
