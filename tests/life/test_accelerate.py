"""Models under accelerate's hooks: served where these leave the experts alone, else refused with a remedy that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from untouched import leaving_untouched

import promoe
from life.models import (
    FAMILIES,
    SOME_FAMILIES,
    ask,
    assert_unharmed,
    build,
    checkpoint,
    loaded,
    opened,
    parts_with_experts,
    patched,
    with_families,
)
from promoe import EmulatedLink
from promoe.errors import ConfigError, UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers

FAST = EmulatedLink(bandwidth_bytes_per_s=1e12)
Wrap = Callable[[Any, Path], Any]
REMEDY = r"something wraps it, such as accelerate's.*remove_hook_from_module\(model, recurse=True\)"


def on_each(parts: Callable[[Any], list[Any]], hook: Callable[[], ModelHook]) -> Wrap:
    """Put a hook of its own on each of some modules."""
    return lambda model, folder: [add_hook_to_module(part, hook()) for part in parts(model)]


def on_cpu() -> ModelHook:
    """What accelerate puts on a module that stays where it is."""
    return AlignDevicesHook(execution_device="cpu", io_same_device=True)


def experts_of(model: Any) -> list[Any]:
    """All experts modules."""
    return [layer.experts for layer in find_moe_layers(model)]


def experts_on_disk(model: Any, folder: Path) -> None:
    """As a device_map with every module says it."""
    names = {layer.name for layer in find_moe_layers(model)}
    outside = {
        name: "cpu"
        for name, _ in model.named_modules()
        if not any(f"{one}.".startswith(f"{name}." if name else "") or name.startswith(one) for one in names)
    }
    dispatch_model(model, outside | dict.fromkeys(names, "disk"), offload_dir=folder, main_device="cpu")


AROUND_EXPERTS: dict[str, Wrap] = {
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "dispatch_model with experts on disk": experts_on_disk,
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "a hook": on_each(experts_of, on_cpu),
    "several hooks": on_each(experts_of, lambda: SequentialHook(ModelHook(), on_cpu())),
    "a hook in the innermost part": on_each(lambda model: parts_with_experts(model)[-1:], on_cpu),
}
ELSEWHERE: dict[str, Wrap] = {
    "dispatch_model to one device": lambda model, folder: dispatch_model(model, {"": "cpu"}),
    "a hook on the model": on_each(lambda model: [model], on_cpu),
    "a hook on the blocks": on_each(lambda model: [layer.block for layer in find_moe_layers(model)], on_cpu),
    "a hook on the gates": on_each(lambda model: [layer.gate for layer in find_moe_layers(model)], on_cpu),
}


@pytest.mark.parametrize(("family", "way"), with_families(AROUND_EXPERTS, with_all=["dispatch_model"]))
def test_hooks_around_experts_are_refused_and_the_remedy_works(family: str, way: str, tmp_path: Path) -> None:
    """accelerate leaves each module an attribute `forward` when it removes its hooks, which would hide a new class."""
    model = build(family)
    expected = ask(model)
    AROUND_EXPERTS[way](model, tmp_path)
    for link in ("auto", FAST):
        with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=REMEDY):
            promoe.patch(model, link=link)
    remove_hook_from_module(model, recurse=True)
    assert any(isinstance(module.__dict__.get("forward"), MethodType) for module in model.modules())
    with leaving_untouched(model), patched(model):
        assert_unharmed(model, expected)
        assert model.promoe.stats().bytes_demand > 0
        assert len(find_moe_layers(model)) == len(model.promoe.runtime.layers)
    assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_experts_with_what_a_hook_left_run_from_slots(family: str) -> None:
    """Their own attribute `forward` is of the part in memory, whose weights must not be what is used."""
    model = build(family)
    expected = ask(model)
    for experts in experts_of(model):
        for part in experts.modules():
            add_hook_to_module(part, ModelHook())
    remove_hook_from_module(model, recurse=True)
    with patched(model):
        ask(model)
        weights = [parameter for experts in experts_of(model) for parameter in experts.parameters()]
        kept = [parameter.data for parameter in weights]
        model.promoe.runtime._live.clear()  # it would notice
        for parameter in weights:  # the store goes on with the old memory
            parameter.data = torch.full_like(parameter.data, torch.nan)
        assert_unharmed(model, expected)
        for parameter, data in zip(weights, kept, strict=True):
            parameter.data = data
    assert_unharmed(model, expected)


@pytest.mark.parametrize(("family", "way"), with_families(ELSEWHERE))
def test_hooks_elsewhere_are_served(family: str, way: str, tmp_path: Path) -> None:
    """And stay as they are; also where the model has an hf_device_map."""
    model = build(family)
    expected = ask(model)
    ELSEWHERE[way](model, tmp_path)
    with leaving_untouched(model), patched(model):
        assert_unharmed(model, expected)
        assert model.promoe.stats().prefill.passes > 0
        assert model.promoe.stats().bytes_demand > 0
    assert_unharmed(model, expected)
    remove_hook_from_module(model, recurse=True)
    with patched(model):
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_that_come_and_go_while_the_model_is_patched(family: str) -> None:
    """A wrapper around our forward must go on working when that is gone."""
    model = build(family)
    expected = ask(model)
    with patched(model):
        for experts in experts_of(model):
            add_hook_to_module(experts, on_cpu())
        assert_unharmed(model, expected)
        remove_hook_from_module(model, recurse=True)
        assert_unharmed(model, expected)
        for experts in experts_of(model):
            add_hook_to_module(experts, on_cpu())
    assert_unharmed(model, expected)
    with pytest.raises(UnsupportedModelError, match=REMEDY):
        promoe.patch(model, link=FAST)
    remove_hook_from_module(model, recurse=True)
    assert_unharmed(model, expected)
    with leaving_untouched(model), patched(model):
        assert_unharmed(model, expected)
        assert model.promoe.stats().bytes_demand > 0
    with patched(model):
        for experts in experts_of(model):
            add_hook_to_module(experts, on_cpu())
    wrapped = [experts.forward for experts in find_all_experts(model)]
    assert not any(isinstance(forward, MethodType) for forward in wrapped), "a hook was lost"
    assert_unharmed(model, expected)


def find_all_experts(model: Any) -> list[Any]:
    """Also where they are wrapped."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]


@pytest.mark.parametrize("asked_meanwhile", [True, False])
@pytest.mark.parametrize("unhooked", ["before unpatching", "after"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_offloaded_under_the_patch(family: str, unhooked: str, asked_meanwhile: bool) -> None:
    """The store keeps their memory; that accelerate brings them back for every call is useless, but harmless."""
    if family == "dbrx" and unhooked == "after":
        pytest.skip("accelerate does not bring back its parameters, which parts of it read, without promoe either")
    model = build(family)
    expected = ask(model)
    with patched(model):
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for experts in experts_of_runtime(model) for parameter in experts.parameters())
        if asked_meanwhile:
            assert_unharmed(model, expected)
        if unhooked == "before unpatching":
            remove_hook_from_module(model, recurse=True)
            assert_unharmed(model, expected)
    assert_unharmed(model, expected)
    remove_hook_from_module(model, recurse=True)
    assert_unharmed(model, expected)


def experts_of_runtime(model: Any) -> list[Any]:
    """Of a patched model that cannot be described any more."""
    return [layer.experts for layer in model.promoe.runtime.layers]


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_device_map_of_one_device_is_served(family: str) -> None:
    """Transformers then needs no hooks."""
    model = loaded(family, device_map={"": "cpu"})
    expected = ask(build(family))
    assert_unharmed(model, expected)
    with leaving_untouched(model), patched(model):
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_experts_that_a_device_map_left_on_disk(family: str, tmp_path: Path) -> None:
    """They are refused, also when the hooks are gone; what to do instead is said, and does."""
    expected = ask(build(family))
    plan = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    plan |= {f"model.layers.{idx}": "cpu" for idx in (0, 2)} | {"model.layers.1": "disk"}
    model = loaded(family, device_map=plan, offload_folder=tmp_path)
    with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=REMEDY):
        promoe.patch(model, link=FAST)
    remove_hook_from_module(model, recurse=True)
    no_weights = r"layers.1.mlp.* on the meta device.*promoe\.from_pretrained"
    with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=no_weights):
        promoe.patch(model, link=FAST)
    with opened(family) as model:
        assert_unharmed(model, expected)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, "cpu"])
def test_a_device_map_with_experts_in_files_is_refused(device_map: Any) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=r"'device_map' argument cannot be used.*Open the model on the CPU"):
        promoe.from_pretrained(checkpoint("qwen2_moe"), device_map=device_map)


def test_offloading_experts_that_are_in_files_is_refused(tmp_path: Path) -> None:
    """accelerate would want their values."""
    with opened("qwen2_moe") as model:
        expected = ask(model)
        for offload in (
            lambda: cpu_offload(model, execution_device=torch.device("cpu")),
            lambda: disk_offload(model, tmp_path, execution_device=torch.device("cpu")),
        ):
            with leaving_untouched(model), pytest.raises(promoe.PromoeError, match="experts are in files"):
                offload()
        assert not list(tmp_path.iterdir())
        assert_unharmed(model, expected)
