"""Machines and models as numbers."""

from __future__ import annotations

import pytest

from promoe.commands.simulate.machine import MACHINES, MODELS, geometry_of, machine_of
from promoe.errors import ConfigError


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_experts_chunks_are_its_bytes(machine: object, model: object) -> None:
    chunks = model.chunks(machine)  # type: ignore[attr-defined]
    assert sum(chunks) == model.expert_bytes  # type: ignore[attr-defined]
    assert max(chunks) <= machine.chunk_bytes + len(chunks)  # type: ignore[attr-defined]
    assert len(chunks) % 3 == 0  # whole matrices, or equal parts of each


def test_sizes_are_the_published_ones() -> None:
    """ProMoE's motivation: 2.67 GiB of expert weights per token of DeepSeek-MoE-16B; Mixtral has 176 MB in an expert layer."""
    assert MODELS["deepseek-moe-16b"].token_bytes / 2**30 == pytest.approx(2.67, rel=0.03)
    assert MODELS["mixtral-8x7b"].expert_bytes == 3 * 4096 * 14336 * 2
    assert MODELS["gpt-oss-20b"].expert_bytes == pytest.approx(13.2e6, rel=0.01)
    assert all(model.other_parameters > 0 for model in MODELS.values())


def test_a_token_reads_every_active_weight_once_and_a_prompt_multiplies() -> None:
    model, machine = MODELS["deepseek-v2-lite"], MACHINES["rtx-4090"]
    read_s = (2 * model.other_parameters + model.token_bytes) / (0.8 * 1008e9)
    assert model.token_s(machine) == pytest.approx(read_s + 26 * 100e-6)
    assert model.expert_s(machine, 1) == model.expert_s(machine, 50)
    assert model.expert_s(machine, 2000) == pytest.approx(2 * 2000 * model.expert_parameters / (0.5 * 165e12))
    assert model.layer_s(machine, 4096) > 2 * model.layer_s(machine)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((26, 64, 6), "deepseek-v2-lite"), ((24, 32, 4), "gpt-oss-20b"), ((24, 59, 4), "qwen1.5-moe-a2.7b")],
)
def test_a_trace_names_its_model_by_its_sizes(sizes: tuple[int, int, int], expected: str) -> None:
    assert geometry_of("auto", *sizes).name == expected


def test_an_unknown_model_has_the_traces_sizes() -> None:
    model = geometry_of("auto", 3, 8, 2)
    assert (model.num_layers, model.num_experts, model.top_k) == (3, 8, 2)
    assert model.expert_bytes == 16 * 2**20


def test_the_wrong_model_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match="expected 26 MoE layers of 64 experts, top 6; found 24 of 32, top 4"):
        geometry_of("deepseek-v2-lite", 24, 32, 4)


def test_unknown_names_are_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no hardware preset 'abacus'.*rtx-4090"):
        machine_of("abacus")
    with pytest.raises(ConfigError, match=r"no model preset 'gpt-7'.*gpt-oss-20b"):
        geometry_of("gpt-7", 1, 1, 1)
