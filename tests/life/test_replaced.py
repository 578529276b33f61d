"""Modules that something replaced after patching, as fused kernels do: an error where experts are gone around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import MOE_FAMILIES
from torch import nn
from torch.nn.utils import parametrize
from untouched import leaving_untouched

import promoe
from life.models import FAMILIES, ask, assert_unharmed, build, differs, opened, patched, with_families
from promoe.errors import PatchStateError, PromoeError
from promoe.experts.moe_layers import MoELayer, find_moe_layers

FIRED = r"The gates of MoE layers \[1\] fired but their experts did not run through promoe"
LEFT_OUT = r"MoE layers \[1\] did not run through promoe"
WHY = r": something replaced '{}', its forward or that of its block.*use_kernels.*may be wrong\. Unpatch the model"
Replace = Callable[[Any, MoELayer, MoELayer], Callable[[], None]]


class Fused:
    """Computes a block at once, as a kernel would: right, but without the block's experts."""

    def __init__(self, layer: MoELayer, twin: MoELayer, asks_gate: bool) -> None:
        self.gate = layer.gate if asks_gate else None
        self.twin = twin.block
        self.flat = type(layer.block).__module__.split(".")[-2] in MOE_FAMILIES

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            self.gate(hidden.reshape(-1, hidden.shape[-1]) if self.flat else hidden)
        return self.twin(hidden, *args, **kwargs)


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns what takes it back."""
    missing = object()
    before = owner._modules.get(name, owner.__dict__.get(name, missing))
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if before is missing else setattr(owner, name, before)


def block_of_other_class(layer: MoELayer, twin: MoELayer) -> Callable[[], None]:
    """The same block, but its class computes in another way."""
    fused = Fused(layer, twin, asks_gate=False)
    before = type(layer.block)
    layer.block.__class__ = type("Fused", (before,), {"forward": lambda self, *args: fused(*args)})
    return lambda: setattr(layer.block, "__class__", before)


def owner_of_block(model: nn.Module, layer: MoELayer) -> tuple[nn.Module, str]:
    """The module whose attribute the block is."""
    path, _, name = layer.block_name.rpartition(".")
    return model.get_submodule(path), name


GOING_AROUND: dict[str, tuple[Replace, str]] = {
    "a block's forward that asks the gate": (
        lambda model, layer, twin: put(layer.block, "forward", Fused(layer, twin, asks_gate=True)),
        FIRED + WHY,
    ),
    "a block's forward": (
        lambda model, layer, twin: put(layer.block, "forward", Fused(layer, twin, asks_gate=False)),
        LEFT_OUT + WHY,
    ),
    "a block's class": (lambda model, layer, twin: block_of_other_class(layer, twin), LEFT_OUT + WHY),
    "a block": (lambda model, layer, twin: put(*owner_of_block(model, layer), twin.block), LEFT_OUT + WHY),
    "the experts' forward": (
        lambda model, layer, twin: put(layer.experts, "forward", twin.experts.forward),
        FIRED + WHY,
    ),
    "the experts": (
        lambda model, layer, twin: put(layer.block, layer.name.rpartition(".")[2], twin.experts),
        r"After patching, something replaced '{}' by a .*Experts.*Unpatch the model",
    ),
}


@pytest.mark.parametrize(
    ("family", "what"),
    with_families(GOING_AROUND, with_all=["a block's forward that asks the gate"]),
)
def test_going_around_the_experts_is_an_error(family: str, what: str) -> None:
    """Even if the bits are right this time; each forward says so, until it is taken back or the model is unpatched."""
    model, twin = build(family), build(family)
    expected = ask(model)
    replace, match = GOING_AROUND[what]
    layer, other = find_moe_layers(model)[1], find_moe_layers(twin)[1]
    match = match.format(layer.name.replace(".", r"\."))
    with patched(model):
        with leaving_untouched(model):
            take_back = replace(model, layer, other)
            with pytest.raises(PromoeError, match=match):
                ask(model)
            take_back()
        assert_unharmed(model, expected)
        take_back = replace(model, layer, other)
        with pytest.raises(PromoeError, match=match):
            ask(model)
        promoe.unpatch(model)
    assert_unharmed(model, expected)  # by the replacement
    take_back()
    with patched(model):
        assert_unharmed(model, expected)


def test_a_class_that_is_changed_for_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is named."""
    model = build("qwen2_moe")
    expected = ask(model)
    with patched(model):
        block_class = type(find_moe_layers(model)[0].block)
        with monkeypatch.context() as kernel:
            kernel.setattr(block_class, "forward", lambda self, hidden: hidden)
            with pytest.raises(PromoeError, match=r"MoE layers \[0, 1, 2\] did not run through promoe.*use_kernels"):
                ask(model)
        assert_unharmed(model, expected)


def test_a_block_that_was_replaced_before_patching_is_noticed() -> None:
    """As a model that was loaded with use_kernels=True has them: its experts would be in slots for nothing."""
    model, twin = build("gpt_oss"), build("gpt_oss")
    layer, other = find_moe_layers(model)[1], find_moe_layers(twin)[1]
    take_back = put(layer.block, "forward", Fused(layer, other, asks_gate=False))
    with patched(model), pytest.raises(PromoeError, match=LEFT_OUT + r".*load it without use_kernels"):
        ask(model)
    take_back()


def test_a_parametrised_weight_is_noticed() -> None:
    """Torch puts it under a new class, whose attribute the stock kernels would read."""

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = build("qwen2_moe")
    expected = ask(model)
    with patched(model):
        experts = find_moe_layers(model)[0].experts
        parametrize.register_parametrization(experts, "down_proj", Doubled())
        with pytest.raises(
            PatchStateError, match=r"changed the class of Qwen2MoeExperts to ParametrizedQwen2MoeExperts"
        ):
            ask(model)
        parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)
        with pytest.raises(PatchStateError, match="something wrote to 'down_proj'"):  # as torch counts it
            ask(model)
    assert_unharmed(model, expected)


# -- what is no error -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "where"), with_families(["memory", "files"], with_all=["memory"]))
def test_another_gate(family: str, where: str) -> None:
    """Its choices are not announced; the experts that are called are the authority."""
    model = build(family)
    expected = ask(model)
    with opened(family) if where == "files" else patched(model) as model:
        for layer in find_moe_layers(model):
            name = layer.gate_name.rpartition(".")[2]
            gate = find_moe_layers(build(family))[layer.layer_idx].gate
            setattr(layer.block, name, gate)
        assert_unharmed(model, expected)
        assert model.promoe.stats().bytes_demand > 0
        assert not model.promoe.runtime.predictor_failed
    if where == "memory":
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_with_another_opinion(family: str) -> None:
    """The answer is that of an unpatched model with this gate."""
    model, twin, other = build(family), build(family), build(family, seed=1)
    before = ask(model)
    for layer, source in zip(find_moe_layers(twin), find_moe_layers(other), strict=True):
        layer.gate.load_state_dict(source.gate.state_dict())
    expected = ask(twin)
    assert differs(expected, before)
    with patched(model):
        assert_unharmed(model, before)
        for layer, source in zip(find_moe_layers(model), find_moe_layers(other), strict=True):
            setattr(layer.block, layer.gate_name.rpartition(".")[2], source.gate)
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapper_that_goes_on_to_what_it_wraps(family: str) -> None:
    """Around blocks, experts and gates alike."""
    model = build(family)
    expected = ask(model)
    calls: list[str] = []

    def wrapping(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        return forward

    with patched(model):
        layer = find_moe_layers(model)[0]
        for name in ("block", "experts", "gate"):
            module = getattr(layer, name)
            module.forward = wrapping(name, module.forward)
        assert_unharmed(model, expected)
        assert set(calls) == {"block", "experts", "gate"}
    assert_unharmed(model, expected)


def test_layers_that_a_pass_needs_not_are_no_error() -> None:
    """An encoder whose output is given is not run; also not if accelerate has wrapped its blocks, which changes nothing."""
    model = build("switch_transformers")
    layers = find_moe_layers(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        encoded = model.get_encoder()(ids)
        arguments = {"encoder_outputs": encoded, "decoder_input_ids": ids}
        expected = model(**arguments).logits
        with patched(model):
            assert torch.equal(model(**arguments).logits, expected)
            assert model.promoe.stats().layer_visits == len([1 for layer in layers if "decoder" in layer.name])
            for layer in layers:
                add_hook_to_module(layer.block, ModelHook())
            assert torch.equal(model(**arguments).logits, expected)
