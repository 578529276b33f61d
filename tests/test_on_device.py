"""Whole models with their slots on a device that is not there: copies are made as late as may be, slots hold NaN before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from served import PROMPTS
from tiny_checkpoint import write_checkpoint
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from unread import Unread
from untouched import assert_same, leaving_untouched, snapshot

import promoe
from promoe.errors import ConfigError, PromoeError
from promoe.experts.moe_layers import MoELayer
from promoe.experts.routed_ids import HostIds
from promoe.model.attach import is_patched
from promoe.runtime import checking
from promoe.transfer.devices import open_device
from promoe.transfer.links import EmulatedLink

NEW_TOKENS = 4
CONFIG = promoe.PromoeConfig(
    strict=True, ablation=promoe.Ablation(governor=False), min_probability=0.3, bypass=False, chunk_bytes=4096
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """What "cuda" opens."""
    found = FakeDevice()
    monkeypatch.setattr(checking, "open_device", lambda name: found if str(name) == "cuda" else open_device(name))
    return found


def answer(model: nn.Module, prompt: str = "one") -> Any:
    """Tokens and scores."""
    with torch.inference_mode():
        found: Any = model.generate(  # type: ignore[operator]
            **PROMPTS[prompt],
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return found.sequences, torch.stack(found.scores)


@contextmanager
def on_device(model: PreTrainedModel, **more: Any) -> Iterator[Any]:
    promoe.patch(model, device="cuda", config=CONFIG, **more)
    try:
        yield model
    finally:
        promoe.unpatch(model)


def assert_same_answers(model: nn.Module, expected: Any, prompt: str = "one") -> None:
    tokens, scores = answer(model, prompt)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(scores, expected[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_bits_are_those_of_the_unmodified_model(family: str, implementation: str, device: FakeDevice) -> None:
    model = build(family, experts_implementation=implementation)
    expected = {prompt: answer(model, prompt) for prompt in PROMPTS}
    for cache, predictor in (("30%", "gate"), ("100%", None)):
        with on_device(model, cache=cache, predictor=predictor) as served:
            for prompt, values in expected.items():
                assert_same_answers(served, values, prompt)
            stats = served.promoe.stats()
            assert device.copied_bytes >= stats.decode.bytes_demand + stats.prefill.bytes_demand > 0
            assert "pinned memory to fake device" in stats.link
    assert_same_answers(model, expected["one"])


@pytest.mark.parametrize("predictor", ["random", "previous", "popularity", None])
def test_one_slot_serves_every_layer(predictor: str | None, device: FakeDevice) -> None:
    model = build("qwen2_moe")
    expected = answer(model)
    slot_bytes = promoe.find_moe_layers(model)[0].layout.slot_bytes
    with on_device(model, cache=slot_bytes, predictor=predictor) as served:
        assert served.promoe.stats().cache_slots == 1
        assert_same_answers(served, expected)


def test_slots_may_be_warmed_and_become_more_or_fewer_between_forwards(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    expected = answer(model)
    with on_device(model, cache="30%", predictor="gate") as served:
        assert served.promoe.warm([[1] * 8] * 3) > 0
        for cache in ("60%", 2, "100%", "30%"):
            served.promoe.resize(cache if isinstance(cache, str) else cache * served.promoe.stats().expert_bytes[0])
            assert_same_answers(served, expected)
        device.memory_bytes = 0
        with pytest.raises(ConfigError, match="Choose a smaller cache"):
            served.promoe.resize("100%")
        assert_same_answers(served, expected)


def test_a_forgotten_wait_is_seen(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: who reads a slot without waiting for its copies reads NaN."""
    from promoe.transfer.device_pool import DevicePool

    monkeypatch.setattr(DevicePool, "begin_read", lambda pool, slots: None)
    model = build("qwen2_moe")
    expected = answer(model)
    with on_device(model, cache="30%", predictor=None) as served:
        assert not torch.equal(answer(served)[1], expected[1])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_the_host_waits_once_per_layer_visit_and_once_per_pass(
    implementation: str, mode: Callable[[], Any], device: FakeDevice
) -> None:
    model = build("qwen2_moe", experts_implementation=implementation)
    ids = PROMPTS["short"]["input_ids"]
    with mode(), on_device(model, cache="30%", predictor=None) as served:
        for inputs in (ids, ids[:, :1]):
            served.promoe.reset_stats()
            before = device.compute.host_waits
            served(input_ids=inputs)
            visits = served.promoe.stats().layer_visits
            assert visits == 3
            assert device.compute.host_waits - before == visits + 1


def run_block(layer: MoELayer, tokens: int, kind: type[torch.Tensor] = torch.Tensor) -> torch.Tensor:
    """What a layer's block makes of some tokens, which stand for tensors on a device if that is their kind."""
    hidden = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        output = layer.block(hidden.as_subclass(kind))
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found.as_subclass(torch.Tensor)


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("cache", ["20%", "100%"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_nothing_is_asked_of_the_device_but_the_ids(
    family: str, implementation: str, cache: str, tokens: int, device: FakeDevice
) -> None:
    model = build(family, experts_implementation=implementation, top_k=3)
    layer = promoe.find_moe_layers(model)[1]
    expected = run_block(layer, tokens)
    with on_device(model, cache=cache, predictor=None):
        for kind in (torch.Tensor, Unread):  # the first token is compared with the stock kernel's
            assert torch.equal(run_block(layer, tokens, kind), expected)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_a_read_is_seen(implementation: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr("promoe.runtime.hot_path.DeviceIds", lambda device: HostIds())
    model = build("qwen3_moe", experts_implementation=implementation)
    with on_device(model, cache="20%", predictor=None) as served, pytest.raises(AssertionError, match="host wait"):
        run_block(promoe.find_moe_layers(served)[1], 40, Unread)


def logits_with(model: nn.Module, hook: Callable[..., Any]) -> torch.Tensor:
    """Of a prompt, while a hook sees what the second layer's experts are called with."""
    handle = promoe.find_moe_layers(model)[1].experts.register_forward_pre_hook(hook)
    try:
        with torch.inference_mode():
            return model(**PROMPTS["one"]).logits  # type: ignore[no-any-return]
    finally:
        handle.remove()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_that_are_changed_after_the_gate_are_read_again(implementation: str, device: FakeDevice) -> None:
    def rotate(experts: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args[0], (args[1] + 3) % 8, args[2]

    model = build("qwen2_moe", experts_implementation=implementation)
    expected = logits_with(model, rotate)
    with on_device(model, cache="30%") as served:
        before = device.compute.host_waits
        assert torch.equal(logits_with(served, rotate), expected)
        assert device.compute.host_waits - before == 3 + 1 + 1


@pytest.mark.parametrize("layer_idx", [1, 2])
def test_ids_that_are_changed_in_place_are_an_error(layer_idx: int, device: FakeDevice) -> None:
    model = build("qwen2_moe")
    expected = answer(model)
    with on_device(model, cache="30%") as served:
        layer = promoe.find_moe_layers(served)[layer_idx]

        def change(experts: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            args[1].add_(3).remainder_(8)

        hook = layer.experts.register_forward_pre_hook(change)
        with torch.inference_mode(), pytest.raises(PromoeError, match=rf"'model.layers.{layer_idx}.mlp.experts'"):
            served(**PROMPTS["one"])
        hook.remove()
        assert_same_answers(served, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cache_for_all_experts_runs_the_stock_forward(implementation: str, device: FakeDevice) -> None:
    model = build("qwen2_moe", experts_implementation=implementation)
    expected = answer(model)
    before = snapshot(model)
    promoe.patch(model, device="cuda", cache="100%")
    layers = promoe.find_moe_layers(model)
    assert not any(is_patched(layer.experts) for layer in layers)
    assert "every expert is in memory" in model.promoe.stats().link
    assert_same_answers(model, expected)
    promoe.unpatch(model)
    assert_same(snapshot(model), before)
    assert (device.copied_bytes, device.host_waits) == (0, 0)


def test_a_device_without_room_for_all_experts_leaves_the_model_as_it_was(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen2_moe")
    last = promoe.find_moe_layers(model)[-1].parameters()[-1]
    to = torch.Tensor.to

    def full(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.data_ptr() == last.data_ptr():
            raise torch.OutOfMemoryError("full")
        return to(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with leaving_untouched(model), pytest.raises(ConfigError, match="Choose a smaller cache"):
        promoe.patch(model, device="cuda", cache="100%")


def test_experts_stay_where_they_are_and_nothing_is_left(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    before = snapshot(model)
    moved: list[int] = []
    with on_device(model, cache="30%") as served:
        layers = promoe.find_moe_layers(served)
        assert {t.data_ptr() for t in device.pinned} == {t.data_ptr() for layer in layers for t in layer.parameters()}
        moved.append(device.copied_bytes)
        answer(served)
    assert moved == [0], "patching itself copies no expert to the device"
    assert device.pinned == []
    after = snapshot(model)
    assert before.keys() == after.keys()


def test_a_device_without_room_leaves_the_model_as_it_was(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    device.memory_bytes = 1000
    with leaving_untouched(model), pytest.raises(ConfigError, match="Choose a smaller cache"):
        promoe.patch(model, device="cuda", cache="50%")


def test_auto_leaves_room_for_the_rest_of_the_model(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    layer = promoe.find_moe_layers(model)[0]
    experts = {id(parameter) for one in promoe.find_moe_layers(model) for parameter in one.parameters()}
    rest_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in experts)
    device.memory_bytes = 2 * 2**30 + rest_bytes + 5 * layer.layout.slot_bytes
    with on_device(model, cache="auto") as served:
        assert served.promoe.stats().cache_slots == 5


def test_what_does_not_go_with_a_device_is_refused(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    with leaving_untouched(model):
        with pytest.raises(ConfigError, match="An EmulatedLink ends in RAM"):
            promoe.patch(model, device="cuda", link=EmulatedLink(1e9))
        for name, match in (("mps", r"Got 'mps'"), ("gpu", r"Got 'gpu'")):
            with pytest.raises(ConfigError, match=match):
                promoe.patch(model, device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said() -> None:
    model = build("qwen2_moe")
    with leaving_untouched(model), pytest.raises(ConfigError, match=r'asks for "cuda"\. Found no GPU that this build'):
        promoe.patch(model, device="cuda")


def test_a_checkpoint_is_served_from_its_files(device: FakeDevice, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    expected = answer(AutoModelForCausalLM.from_pretrained(folder).eval())
    slot_bytes = promoe.find_moe_layers(AutoModelForCausalLM.from_pretrained(folder))[0].layout.slot_bytes
    for pinned_bytes, how in (
        (None, "of pinned RAM (24 of 24 experts) to fake device"),
        (4 * slot_bytes, "of pinned RAM (4 of 24 experts) to fake device"),
        (0, "of pinned RAM (4 of 24 experts) to fake device"),
    ):
        settings = replace(CONFIG, pinned_bytes=pinned_bytes)
        model = promoe.from_pretrained(folder, device="cuda", cache="30%", config=settings)
        assert_same_answers(model, expected)
        assert how in model.promoe.stats().link  # type: ignore[union-attr]
        promoe.unpatch(model)
        assert device.pinned == []
        assert_same_answers(model, expected)


def test_too_little_pinned_memory_is_said(device: FakeDevice, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"'pinned_bytes' .* 4 experts of .* Got 1000 instead"):
        promoe.from_pretrained(folder, device="cuda", config=replace(CONFIG, pinned_bytes=1000))


def test_generate_is_kept_from_capturing_graphs(device: FakeDevice) -> None:
    model = build("qwen2_moe")
    before = model.generation_config.disable_compile
    with on_device(model) as served:
        assert served.generation_config.disable_compile is True
    assert model.generation_config.disable_compile == before


def test_tied_weights_stay_tied(device: FakeDevice) -> None:
    model = build("qwen2_moe", tie_word_embeddings=True)
    with on_device(model) as served:
        assert served.lm_head.weight is served.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_interrupted_placement_is_taken_back(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from promoe.runtime import assembly

    def broken(*args: Any) -> None:
        raise RuntimeError("injected")

    model = build("qwen2_moe")
    before, reference = snapshot(model), copy.deepcopy(model)
    monkeypatch.setattr(assembly.attach, "attach", broken)
    with pytest.raises(RuntimeError, match="injected"):
        promoe.patch(model, device="cuda")
    assert_same(before, snapshot(model))
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, other)
