"""Every MoE family of the installed Transformers: found, tapped, exact from few slots, exact after unpatching.

Nothing here lists the families. One that a new version of Transformers brings is in these tests from then on, and fails
them, by name, until it is handled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from served import config
from untouched import assert_same, snapshot

import promoe
from promoe.errors import UnsupportedModelError
from promoe.experts.adapters import Adapter
from promoe.experts.moe_layers import find_moe_layers
from promoe.runtime import checking
from zoo.exactness import assert_equal, cache_bytes, outputs, served
from zoo.families import build, family_of, inputs, names, served_families
from zoo.scan import experts_classes

# Run for every token: no router chooses among them, and there is nothing to gain from leaving them in slow memory.
ALWAYS_ACTIVE = {"AriaSharedExpertsMLP", "InklingSharedExperts"}
SLOTS = 3
COMBINATIONS = [
    (dtype, implementation) for dtype in (torch.float32, torch.bfloat16) for implementation in Adapter.implementations
]


def in_turn() -> list[Any]:
    """All names with all combinations. Each name has one in fp32 and one in bf16 in the default tests, the next name others."""
    found = []
    for number, name in enumerate(names()):
        for idx, (dtype, implementation) in enumerate(COMBINATIONS):
            by_default = idx % len(Adapter.implementations) == number % len(Adapter.implementations)
            marks = () if by_default else (pytest.mark.slow,)
            label = f"{name}-{dtype}-{implementation}".replace("torch.", "")
            found.append(pytest.param(name, dtype, implementation, id=label, marks=marks))
    return found


# What a gate itself writes down about its latest call.
WRITTEN_BY_GATES = "router.expert_capacity"


@pytest.mark.parametrize("family", served_families())
def test_every_experts_class_is_found(family: str) -> None:
    """Each class that the scan finds is in a tiny model, and each of its modules is a layer that promoe describes."""
    built: set[str] = set()
    for name in names():
        if name.split()[0] == family:
            model = build(name)
            found = {layer.name for layer in find_moe_layers(model)}
            modules = {path: type(module).__name__ for path, module in model.named_modules()}
            built |= set(modules.values())
            expected = {path for path, cls in modules.items() if cls in experts_classes()[family]}
            assert found == {path for path in expected if modules[path] not in ALWAYS_ACTIVE}
    assert set(experts_classes()[family]) <= built, "add a tiny model of the missing class to zoo.families.FAMILIES"


@pytest.mark.parametrize("family", sorted(set(experts_classes()) - set(served_families())))
def test_a_form_that_later_versions_gave_up_is_refused(family: str) -> None:
    """By name, before anything is touched."""
    with pytest.raises(UnsupportedModelError, match=experts_classes()[family][-1]):
        find_moe_layers(build(family))


@pytest.mark.parametrize(("name", "dtype", "implementation"), in_turn())
def test_the_same_bits_from_few_slots(name: str, dtype: torch.dtype, implementation: str) -> None:
    """A prompt and a token after it, with three slots for the experts of all layers; and all is undone afterwards."""
    if dtype is torch.bfloat16 and not family_of(name).runs_in_bf16:
        pytest.skip("the unmodified model does not run in bf16")
    model = build(name, dtype)
    if any(layer.implementation != implementation for layer in use(model, implementation)):
        pytest.skip("this family's experts have one kernel only")
    tokens = inputs(name, model)
    expected, before = outputs(model, tokens), state_of(model)
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    with served(model, SLOTS):
        watched = Watched(model)
        assert_equal(outputs(model, tokens), expected)
        watched.check(forecasts=family_of(name).forecasts)
        assert model.promoe.stats().bytes_demand > 0
    assert_same(before, state_of(model))
    assert_equal(outputs(model, tokens), expected)


@pytest.mark.parametrize("name", names())
def test_the_same_bits_from_few_slots_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ids are read at the gate, and no family may change them in place before its experts run."""
    monkeypatch.setattr(checking, "open_device", lambda name: FakeDevice())
    model = build(name, torch.float32)
    layers = use(model, "grouped_mm")
    tokens = inputs(name, model)
    expected = outputs(model, tokens)
    promoe.patch(model, device="cuda", cache=cache_bytes(layers, SLOTS), config=config())
    try:
        assert_equal(outputs(model, tokens), expected)
        assert not model.promoe.runtime.predictor_failed
    finally:
        promoe.unpatch(model)


@pytest.mark.parametrize("name", names())
def test_the_same_bits_from_disk_and_back(name: str) -> None:
    """Experts that were in memory, served from files; the very parameters, with their values, are the model's afterwards."""
    model = build(name, torch.float32)
    layers, tokens = use(model, "grouped_mm"), inputs(name, model)
    expected = outputs(model, tokens)
    before = [[(tensor, tensor.clone(), tensor.requires_grad) for tensor in layer.parameters()] for layer in layers]
    with served(model, SLOTS, store="disk"):
        assert all(tensor.numel() == 0 for of_layer in before for tensor, _, _ in of_layer)
        assert_equal(outputs(model, tokens), expected)
        assert model.promoe.stats().bytes_demand > 0
    for layer, of_layer in zip(layers, before, strict=True):
        for tensor, (was, values, requires_grad) in zip(layer.parameters(), of_layer, strict=True):
            assert tensor is was
            assert torch.equal(tensor, values)
            assert tensor.requires_grad == requires_grad
    assert_equal(outputs(model, tokens), expected)


def state_of(model: Any) -> dict[str, Any]:
    """All that patching must leave as it was."""
    return {name: state for name, state in snapshot(model).items() if not name.endswith(WRITTEN_BY_GATES)}


def use(model: Any, implementation: str) -> list[promoe.MoELayer]:
    """The layers of a model, with their experts switched to one of the kernels, if its family has several."""
    layers = find_moe_layers(model)
    for layer in layers:
        if hasattr(layer.experts, "config"):
            layer.experts.config._experts_implementation = implementation
    return layers


class Watched:
    """What a served model's gates announced, what its experts then needed, and what was forecast."""

    def __init__(self, model: Any) -> None:
        self.runtime = model.promoe.runtime
        engine = self.runtime.engine
        self.hinted: dict[int, list[int]] = {}
        self.visits = 0
        self.forecasts = 0
        self._hint, self._visit, self._forecast = engine.hint, engine.visit, engine.scheduler.forecast
        engine.hint, engine.visit, engine.scheduler.forecast = self.hint, self.visit, self.forecast

    def hint(self, layer_idx: int, ids: list[int]) -> int:
        self.hinted[layer_idx] = ids
        return self._hint(layer_idx, ids)

    def visit(self, layer_idx: int, ids: list[int], *args: Any) -> Any:
        assert self.hinted.pop(layer_idx) == ids, f"MoE layer {layer_idx}: its gate announced other experts"
        self.visits += 1
        return self._visit(layer_idx, ids, *args)

    def forecast(self, *args: Any) -> None:
        self.forecasts += 1
        self._forecast(*args)

    def check(self, forecasts: bool) -> None:
        """Every layer was announced before it ran, and the gate predictor can ask this family's gates."""
        if self.runtime.forecaster is not None:
            self.runtime.forecaster.drain()
        assert self.visits >= len(self.runtime.layers) // 2, "most layers did not run"
        assert not self.hinted, "gates announced layers that did not run"
        assert not self.runtime.predictor_failed
        assert bool(self.forecasts) == (forecasts and len(self.runtime.layers) > 1)
