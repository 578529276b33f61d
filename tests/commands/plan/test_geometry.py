"""A checkpoint's sizes for the simulator: those of the model that would be opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import write_fp8
from tiny_models import build

from promoe.commands.plan import geometry
from promoe.commands.plan.geometry import read_geometry
from promoe.commands.simulate.machine import geometry_of
from promoe.errors import CheckpointError, ConfigError
from promoe.experts.moe_layers import find_moe_layers


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
    read_model = geometry.read_model

    def of_two_sizes(path: str) -> Any:
        read = read_model(path)
        first, *others = read.sizes.layers
        layers = (dataclasses.replace(first, top_k=first.top_k + 1), *others)
        return dataclasses.replace(read, sizes=dataclasses.replace(read.sizes, layers=layers))

    monkeypatch.setattr(geometry, "read_model", of_two_sizes)
    with pytest.raises(ConfigError, match="not all of one size"):
        read_geometry(str(tmp_path))
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_geometry(str(tmp_path / "none"))
