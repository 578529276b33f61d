"""`benchmarks/gpu.py` on a device that is not there: what can be wrong before a GPU is rented."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from quantised_twin import quantised
from served import load_stock
from tiny_models import build

import promoe
from promoe.commands.measure import Generation
from promoe.runtime import checking

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
NEW_TOKENS = 3


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # for what the scripts share
        spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice()
    monkeypatch.setattr(checking, "open_device", lambda name: found)
    return found


def random_prompts(*lengths: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 64, (1, length), generator=draw) for length in lengths]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def logits(model: Any, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**prompt).logits
    return found


def test_probes(gpu: ModuleType, device: FakeDevice) -> None:
    assert gpu.pinned_bandwidth(device, 4096) > 0
    assert gpu.id_latency_s(device) > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_streamed_layers_compute_the_same_and_leave_the_model_as_it_was(
    layers: int, gpu: ModuleType, device: FakeDevice
) -> None:
    base = build("qwen2_moe", layers=layers)
    (prompt,) = random_prompts(32)
    expected = logits(base, prompt)
    model = gpu.with_own_experts(gpu.sharing_experts(base))
    streamed = gpu.StreamedLayers(model, device)
    for _ in range(2):
        assert torch.equal(logits(model, prompt), expected)
    experts_bytes = sum(t.nbytes for layer in promoe.find_moe_layers(base) for t in layer.parameters())
    assert device.copied_bytes >= 2 * experts_bytes - (experts_bytes // layers)
    streamed.close()
    assert torch.equal(logits(model, prompt), expected)
    for own, other in zip(base.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_systems_beside_each_other(
    gpu: ModuleType, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = build("qwen2_moe")
    run = gpu.answering(NEW_TOKENS)
    with gpu.Bench.of(base, random_prompts(32, 32, 20), run, 1e9, device) as bench:
        rows = bench.whole(run, with_offload=False)
        assert [(row["system"], row["answers"]) for row in rows] == [(gpu.RESIDENT, 2), (gpu.STREAMED, 2)]
        rows += gpu.sweep(bench, ["30%", "100%"], None, gpu.Clock(60))
    printed = capsys.readouterr().out
    names = [row["system"] for row in rows[2:]]
    patched = [system.name for system in gpu.SYSTEMS]
    assert names == [gpu.RESIDENT, *patched, gpu.RESIDENT, gpu.BYPASS, gpu.IN_SLOTS]
    for row in rows:
        assert row["same_answers"] == row["answers"]
        assert row["tpot_s"] > 0
        assert row["to_resident"] == 1.0 or row["system"] != gpu.RESIDENT
        assert row["system"] in printed
        assert ("bound_s" in row) == (row["system"] in (*patched, gpu.IN_SLOTS))
    assert not hasattr(base, "promoe")
    assert device.pinned == []


def test_experts_in_fewer_bits_beside_16_bits(
    gpu: ModuleType, device: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantised("qwen2_moe", "int4")
    base, run = load_stock(folder), gpu.answering(NEW_TOKENS)
    layers = promoe.find_moe_layers(base)
    cache_bytes = 24 * layers[0].layout.slot_bytes // 2
    with gpu.models_in_forms(folder, ["int4"], cache_bytes, "grouped_mm") as models:
        stats = {name: model.promoe.stats() for name, model in models.items()}
    assert [stats[name].cache_slots for name in (gpu.IN_FILES, "int4, expanded")] == [12, 24]
    assert all(one.cache_bytes <= cache_bytes for one in stats.values())
    with gpu.Bench.of(base, random_prompts(32, 32, 20), run, 1e9, device) as bench:
        rows = bench.in_forms(folder, ["int4"], "25%")
    printed = capsys.readouterr().out
    assert "cache 25% of the bytes in 16 bits" in printed
    assert [row["system"] for row in rows] == [gpu.RESIDENT, gpu.IN_FILES, "int4, expanded"]
    assert [row["same_answers"] for row in rows[:2]] == [3, 3]
    assert rows[2]["bytes_per_token"] < rows[1]["bytes_per_token"]
    assert all(row["bound_s"] > 0 for row in rows[1:])


def test_patched_models_share_the_memory_of_experts_and_no_parameter(gpu: ModuleType, device: FakeDevice) -> None:
    """One that is moved to the device whole must not take the others' along."""
    base = build("qwen2_moe")
    own = {id(parameter) for parameter in base.parameters()}
    addresses = [parameter.data_ptr() for layer in promoe.find_moe_layers(base) for parameter in layer.parameters()]
    with gpu.patched_models(base, "100%", None) as models:
        for model in models.values():
            found = [parameter for layer in promoe.find_moe_layers(model) for parameter in layer.parameters()]
            assert [parameter.data_ptr() for parameter in found] == addresses
            assert not own.intersection(map(id, model.parameters()))


def test_without_time_things_are_left_out_and_that_is_said(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.sweep(None, ["30%"], None, gpu.Clock(0.1)) == []
    assert "cache 30%: left out" in capsys.readouterr().out


def test_a_generation_is_of_the_length_that_was_asked_for(gpu: ModuleType) -> None:
    (prompt,) = random_prompts(32)
    found: Generation = gpu.answering(NEW_TOKENS)(build("qwen2_moe"), prompt)
    assert len(found.tokens) == NEW_TOKENS
