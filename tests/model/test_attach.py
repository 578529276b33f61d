from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPTS, checkpoint, close, config, expected, greedy, served, stock
from tiny_models import MOE_FAMILIES
from torch import nn
from transformers import PreTrainedModel

import promoe
from promoe.errors import PatchStateError, PromoeError, UnsupportedModelError
from promoe.model import attach

FAMILY = "qwen2_moe"


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Patched, with two slots."""
    with served(FAMILY, cache=2, predictor="gate") as model:
        yield model


def assert_unharmed(model: nn.Module) -> None:
    wanted = expected(FAMILY, torch.float32, "grouped_mm", "one")
    greedy(model, PROMPTS["one"]).assert_equals(wanted)


def wanted_with(hook_up: Callable[[nn.Module], list[Any]]) -> torch.Tensor:
    """The logits of an unmodified model of the same weights with the same hooks."""
    plain = stock(FAMILY)
    plain.set_experts_implementation("grouped_mm")
    hooks = hook_up(plain)
    try:
        return greedy(plain, PROMPTS["one"], 1).logits[-1]
    finally:
        for hook in hooks:
            hook.remove()


# -- what happens between gate and experts ----------------------------------------------------------------------


def test_gate_called_twice(model: PreTrainedModel) -> None:
    calls = []

    def again(gate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not calls or calls[-1] != "again":
            calls.append("again")
            gate(args[0].flip(0))  # other tokens first: another hint for the same layer
            calls.append("done")

    hooks = [layer.gate.register_forward_hook(again) for layer in promoe.find_moe_layers(model)]
    assert_unharmed(model)
    assert len(calls) > 10
    for hook in hooks:
        hook.remove()


def test_gate_called_alone_is_a_hint_that_nobody_follows(model: PreTrainedModel) -> None:
    layers = promoe.find_moe_layers(model)
    with torch.inference_mode():
        for seed in range(5):
            for layer in layers:
                layer.gate(torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)))
    assert_unharmed(model)
    assert model.promoe.stats().layer_visits == len(layers) * (1 + len(expected_steps()))


def expected_steps() -> tuple[torch.Tensor, ...]:
    return expected(FAMILY, torch.float32, "grouped_mm", "one").logits[1:]


def test_exception_between_gate_and_experts(model: PreTrainedModel) -> None:
    layer = promoe.find_moe_layers(model)[1]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for error, hook in (
        (ZeroDivisionError, lambda *args: 1 // 0),
        (KeyboardInterrupt, interrupt),
    ):
        handle = layer.experts.register_forward_pre_hook(hook)
        with pytest.raises(error):
            greedy(model, PROMPTS["one"])
        handle.remove()
        assert_unharmed(model)
    assert model.promoe.stats().prefill.passes_aborted == 2


def test_exception_inside_the_experts(model: PreTrainedModel) -> None:
    layer = promoe.find_moe_layers(model)[0]
    original, calls = layer.experts.act_fn, []

    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return original(x) if len(calls) < 2 else 1 // 0  # type: ignore[return-value]

    layer.experts.act_fn = Breaking()
    with pytest.raises(ZeroDivisionError):
        greedy(model, PROMPTS["one"])
    layer.experts.act_fn = original
    caches = model.promoe.runtime.engine.scheduler.caches
    assert [cache.num_pinned for cache in caches] == [0]
    assert_unharmed(model)


def test_ids_changed_between_gate_and_experts(model: PreTrainedModel) -> None:
    """The ids that the experts get are the authority, whatever the gate announced."""

    def rotate(experts: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, index, weights = args
        return hidden, (index + 3) % 8, weights

    def hook_up(some: nn.Module) -> list[Any]:
        return [layer.experts.register_forward_pre_hook(rotate) for layer in promoe.find_moe_layers(some)]

    wanted = wanted_with(hook_up)
    hooks = hook_up(model)
    for _ in range(2):
        assert torch.equal(greedy(model, PROMPTS["one"], 1).logits[-1], wanted)
    for hook in hooks:
        hook.remove()
    assert not torch.equal(wanted, expected_steps()[0])
    assert_unharmed(model)


def test_hooks_that_replace_the_outputs_of_gate_and_experts_still_work(model: PreTrainedModel) -> None:
    def smaller(experts: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / 2

    def even(gate: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, index = output
        return logits, torch.full_like(weights, 0.5), index

    def hook_up(some: nn.Module) -> list[Any]:
        layers = promoe.find_moe_layers(some)
        return [
            *(layer.experts.register_forward_hook(smaller) for layer in layers),
            *(layer.gate.register_forward_hook(even) for layer in layers),
        ]

    wanted = wanted_with(hook_up)
    hooks = hook_up(model)
    assert torch.equal(greedy(model, PROMPTS["one"], 1).logits[-1], wanted)
    for hook in hooks:
        hook.remove()


def test_router_logits_are_recorded_once_per_layer(model: PreTrainedModel) -> None:
    """The tap returns nothing and predictors go past the hooks: outputs that transformers collects are the stock ones."""
    with torch.inference_mode():
        found = model(**PROMPTS["one"], output_router_logits=True)
    assert len(found.router_logits) == 3
    assert torch.equal(found.logits, expected(FAMILY, torch.float32, "grouped_mm", "one").logits[0])


def test_experts_called_alone_with_their_gate(model: PreTrainedModel) -> None:
    """A block outside of any pass of the model."""
    plain = stock(FAMILY)
    plain.set_experts_implementation("grouped_mm")
    hidden = torch.randn(1, 5, 64)
    with torch.inference_mode():
        for ours, theirs in zip(promoe.find_moe_layers(model), promoe.find_moe_layers(plain), strict=True):
            found = model.get_submodule(ours.block_name)(hidden)
            assert torch.equal(found, plain.get_submodule(theirs.block_name)(hidden))
    assert model.promoe.stats().prefill.passes == 0
    assert_unharmed(model)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_gate_whose_experts_were_not_entered_is_an_error(family: str) -> None:
    with served(family, cache=2) as model:
        layer = promoe.find_moe_layers(model)[0]
        block = model.get_submodule(layer.block_name)

        def fused(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            layer.gate(hidden.reshape(-1, hidden.shape[-1]))
            return (hidden, None) if family == "gpt_oss" else hidden

        block.forward = fused
        with pytest.raises(PromoeError, match=rf"layers \[0\] fired.*{layer.name}"):
            greedy(model, PROMPTS["one"])
        del block.forward
        wanted = expected(family, torch.float32, "grouped_mm", "one")
        greedy(model, PROMPTS["one"]).assert_equals(wanted)


# -- changes to a patched model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to"])
@pytest.mark.parametrize("part", ["", "model", "model.layers", "model.layers.1", "model.layers.1.mlp.experts"])
def test_another_dtype_is_refused_before_anything_was_cast(model: PreTrainedModel, change: str, part: str) -> None:
    changed = model.get_submodule(part)
    with pytest.raises(UnsupportedModelError, match=r"change its dtype .*torch.float32"):
        changed.to(torch.float16) if change == "to" else getattr(changed, change)()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_unharmed(model)


def test_the_same_dtype_and_device_is_no_change(model: PreTrainedModel) -> None:
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    names = list(model.state_dict())
    assert model.to("cpu").float().to(torch.float32) is model
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == names
    assert_unharmed(model)


@pytest.mark.parametrize("part", ["", "model.layers.1", "model.layers.1.mlp.experts"])
def test_loading_a_state_dict_is_refused_before_anything_was_loaded(model: PreTrainedModel, part: str) -> None:
    """New weights under slots that hold the old ones would be a silent wrong weight."""
    module = model.get_submodule(part)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    with pytest.raises(PatchStateError, match="cannot load a state_dict"):
        module.load_state_dict(zeros)
    assert_unharmed(model)


@pytest.mark.parametrize("part", ["", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.experts"])
def test_copying_is_refused(model: PreTrainedModel, part: str) -> None:
    with pytest.raises(PatchStateError, match=r"can(not)? be copied.*[Uu]npatch"):
        copy.deepcopy(model.get_submodule(part))
    assert_unharmed(model)


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp.experts"])
def test_pickling_is_refused(model: PreTrainedModel, part: str) -> None:
    module = model.get_submodule(part)
    with pytest.raises(PatchStateError, match=r"pickled.*[Uu]npatch"):
        pickle.dumps(module)
    with pytest.raises(PatchStateError, match=r"pickled.*[Uu]npatch"):
        torch.save(module, io.BytesIO())
    assert_unharmed(model)


def test_the_class_keeps_its_name_and_its_kind(model: PreTrainedModel) -> None:
    experts = promoe.find_moe_layers(model)[0].experts
    base = type(experts).__mro__[1]
    assert attach.is_patched(experts)
    assert isinstance(experts, base)
    assert attach.patched_class(base) is type(experts)
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(experts), attribute) == getattr(base, attribute)
    assert repr(experts) == repr(promoe.find_moe_layers(stock(FAMILY))[0].experts)


def test_guarded_experts_of_a_file_store_are_refused_outside_the_model(tmp_path: Path) -> None:
    model = promoe.from_pretrained(checkpoint(FAMILY), cache=2 * 24576, config=config())
    try:
        for use in (model.state_dict, lambda: model.save_pretrained(tmp_path), lambda: copy.deepcopy(model)):
            with pytest.raises(PromoeError):
                use()
        with pytest.raises(UnsupportedModelError, match="change its dtype"):
            model.half()
        model.set_experts_implementation("grouped_mm")
        assert_unharmed(model)
    finally:
        close(model)
