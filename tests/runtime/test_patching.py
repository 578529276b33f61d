"""`patch` and `unpatch`: what is refused, that a refusal or a failure touches nothing, and that undoing is exact."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from served import PROMPTS, LinkOver, Outputs, config, greedy, plain_link
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build, make_config
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from untouched import assert_same, leaving_untouched, snapshot

import promoe
from promoe import EmulatedLink
from promoe.errors import ConfigError, EngineClosedError, PatchStateError, UnsupportedModelError
from promoe.model import attach
from promoe.runtime import assembly
from promoe.scheduler import ExpertKey

FAST = EmulatedLink(bandwidth_bytes_per_s=1e12)
EXPERTS = 24  # of a tiny model, in three layers


def answer(model: nn.Module) -> Outputs:
    return greedy(model, PROMPTS["short"], new_tokens=1)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen2_moe", top_k=3)


@contextmanager
def patched(model: PreTrainedModel, **arguments: Any) -> Iterator[PreTrainedModel]:
    """Served from two slots, unless said otherwise, until the context ends or the model is unpatched."""
    slot_bytes = promoe.find_moe_layers(model)[0].layout.slot_bytes
    defaults = {"cache": 2 * slot_bytes, "link": LinkOver(plain_link), "config": config()}
    promoe.patch(model, **(defaults | arguments))
    try:
        yield model
    finally:
        if hasattr(model, "promoe"):
            promoe.unpatch(model)


# -- undoing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_unpatch_restores_everything(family: str) -> None:
    model = build(family)
    wanted = answer(model)
    with leaving_untouched(model):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with patched(model, predictor="gate"):
            answer(model).assert_equals(wanted)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    answer(model).assert_equals(wanted)


def test_names_parameters_and_state_dict_are_the_models_own_while_it_is_patched(model: PreTrainedModel) -> None:
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    modules = [name for name, _ in model.named_modules()]
    with patched(model):
        answer(model)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == state
        assert list(model.state_dict()) == list(state)
        assert [name for name, _ in model.named_modules()] == modules


def test_patching_again_and_again(model: PreTrainedModel) -> None:
    wanted = answer(model)
    with leaving_untouched(model):
        for predictor in (None, "gate", "random"):
            with patched(model, predictor=predictor):
                answer(model).assert_equals(wanted)


def test_a_patched_model_saves_its_own_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    with patched(model):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = model.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in loaded.state_dict().items())


def test_hooks_of_others_survive(model: PreTrainedModel) -> None:
    layer, calls = promoe.find_moe_layers(model)[0], []
    before = layer.gate.register_forward_hook(lambda *args: calls.append("before"))
    with patched(model):
        after = layer.gate.register_forward_hook(lambda *args: calls.append("after"))
    answer(model)
    assert calls == ["before", "after"] * 2
    before.remove()
    after.remove()
    assert not layer.gate._forward_hooks


def test_unpatch_after_close_and_after_an_exception(model: PreTrainedModel) -> None:
    wanted = answer(model)
    with leaving_untouched(model):
        with patched(model):
            model.promoe.close()
            model.promoe.close()
            with pytest.raises(EngineClosedError, match=r"promoe\.unpatch\(model\)"):
                answer(model)
        with patched(model):
            hook = promoe.find_moe_layers(model)[1].experts.register_forward_pre_hook(lambda *args: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                answer(model)
            hook.remove()
    answer(model).assert_equals(wanted)


def test_nothing_keeps_the_slots_alive(model: PreTrainedModel) -> None:
    with patched(model, predictor="gate"):
        answer(model)
        left = [weakref.ref(part) for part in (model.promoe, model.promoe.runtime, model.promoe.runtime.engine)]
        left += [weakref.ref(pool._regions[0]) for pool in model.promoe._pools]
    gc.collect()
    assert [part() for part in left] == [None] * len(left)


def test_unpatching_what_is_not_patched(model: PreTrainedModel) -> None:
    with leaving_untouched(model), pytest.raises(PatchStateError, match="Qwen2MoeForCausalLM is not patched"):
        promoe.unpatch(model)
    with patched(model):
        promoe.unpatch(model)
        with pytest.raises(PatchStateError, match="not patched"):
            promoe.unpatch(model)


# -- one copy of the weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_the_store_is_the_models_own_memory(family: str) -> None:
    model = build(family, dtype=torch.bfloat16)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with patched(model, config=config(chunk_bytes=4096)):
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
        store = model.promoe._store
        for layer in promoe.find_moe_layers(model):
            for expert_idx in range(layer.num_experts):
                wanted = [
                    (getattr(layer.experts, spec.name)[expert_idx].data_ptr(), spec.nbytes)
                    for spec in layer.layout.tensors
                ]
                views = [
                    np.frombuffer(store.view(chunk), np.uint8)
                    for chunk in store.chunks(ExpertKey(layer.layer_idx, expert_idx))
                ]
                assert joined([(view.ctypes.data, view.nbytes) for view in views], wanted) == wanted


def joined(chunks: list[tuple[int, int]], whole: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Chunks (address, bytes) that follow each other, joined; a new one starts where one of `whole` starts."""
    starts, result = {address for address, _ in whole}, []
    for address, nbytes in chunks:
        if result and address not in starts and sum(result[-1]) == address:
            result[-1] = (result[-1][0], result[-1][1] + nbytes)
        else:
            result.append((address, nbytes))
    return result


def test_the_only_new_weights_are_the_slots(model: PreTrainedModel) -> None:
    with patched(model, cache="25%"):
        stats, layer = model.promoe.stats(), promoe.find_moe_layers(model)[0]
        assert stats.cache_slots == EXPERTS // 4
        assert stats.cache_bytes == EXPERTS // 4 * layer.layout.slot_bytes == sum(p.nbytes for p in model.promoe._pools)


# -- bad input --------------------------------------------------------------------------------------------------

MALFORMED = ["", "50", "half", "-5%", "0%", "101%", "0GiB", "6 potatoes", "1e3MB", "nan%", 0, -1, 1.5, True, None]


@pytest.mark.parametrize("link", ["auto", FAST], ids=["auto", "emulated"])
@pytest.mark.parametrize("cache", MALFORMED, ids=repr)
def test_a_malformed_cache(model: PreTrainedModel, cache: Any, link: Any) -> None:
    wanted = rf"'cache' argument must be a size such as .*Got {re.escape(repr(cache))} instead"
    with leaving_untouched(model), pytest.raises(ConfigError, match=wanted):
        promoe.patch(model, cache=cache, link=link)


@pytest.mark.parametrize("cache", [1, "1B", "1%", "4%", "0.02MiB"])
def test_a_cache_that_is_too_small_says_what_would_do(model: PreTrainedModel, cache: Any) -> None:
    slot_bytes = promoe.find_moe_layers(model)[0].layout.slot_bytes
    with leaving_untouched(model):
        wanted = rf"must be at least 24\.0 KiB = {slot_bytes} bytes .*Got {re.escape(repr(cache))} = .*Try cache=\"5%\""
        with pytest.raises(ConfigError, match=wanted):
            promoe.patch(model, cache=cache, link=FAST)
        with pytest.raises(ConfigError):
            promoe.patch(model, cache=slot_bytes - 1, link=FAST)
        for enough in (slot_bytes, "5%"):
            with patched(model, cache=enough):
                assert model.promoe.stats().cache_slots == 1


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {"predictor": "crystal ball"},
        r"'predictor' argument must be None \(--predictor none\), .*'gate', 'correlation'.*Got 'crystal ball'",
    ),
    ({"predictor": promoe.PromoeConfig}, r"'predictor' argument .*Got the class PromoeConfig"),
    ({"predictor": 7}, r"'predictor' argument .*predict\(visit\).*Got int"),
    ({"store": "cloud"}, r"'store' argument must be .*Got 'cloud'"),
    (
        {"store": "disk", "link": "host"},
        r"link=\"host\" copies experts from RAM, but this model's are .*without store=\"disk\"",
    ),
    ({"link": "carrier pigeon"}, r"'link' argument must be .*Got 'carrier pigeon'"),
    ({"link": "file"}, r"link=\"file\" reads experts from files, but this model's are in RAM"),
]


@pytest.mark.parametrize(("arguments", "match"), WRONG_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_wrong_arguments(model: PreTrainedModel, arguments: dict[str, Any], match: str) -> None:
    wanted = answer(model)
    with leaving_untouched(model), pytest.raises(ConfigError, match=match):
        promoe.patch(model, **({"link": FAST} | arguments))
    answer(model).assert_equals(wanted)


class Quantised(torch.Tensor):
    """A tensor subclass, as quantisers make them."""


def quantise(model: PreTrainedModel) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data.as_subclass(Quantised), requires_grad=False)


def make_rows_strided(model: PreTrainedModel) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.down_proj.data = experts.down_proj.data.transpose(1, 2).contiguous().transpose(1, 2)


WRONG_STATES: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "quantised with a tensor subclass": (
        quantise,
        r"layers\.1\.mlp\.experts\.down_proj' is a .*Quantised, not a plain",
    ),
    "expert parallel": (
        lambda model: setattr(model.model.layers[2].mlp.experts, "_is_expert_parallel", True),
        r"layers\.2\.mlp\.experts' is expert parallel.*without enable_expert_parallel",
    ),
    "an expert parallel plan": (
        lambda model: setattr(model.config, "distributed_config", SimpleNamespace(enable_expert_parallel=True)),
        r"is expert parallel",
    ),
    "training": (lambda model: model.train(), r"in training mode.*model\.eval\(\)"),
    "another implementation": (
        lambda model: setattr(model.config, "_experts_implementation", "deepgemm"),
        r"experts_implementation='deepgemm'. Supported for them: eager",
    ),
    "wrapped by a hook": (
        lambda model: setattr(model.model.layers[0].mlp.experts, "forward", lambda *args: None),
        r"has a forward of its own instance.*device_map",
    ),
    "strided rows": (
        make_rows_strided,
        r"rows of tensor down_proj of MoE layer 1 are not contiguous.*\.contiguous\(\)",
    ),
}


@pytest.mark.parametrize("state", WRONG_STATES)
def test_models_in_a_state_that_cannot_be_served(model: PreTrainedModel, state: str) -> None:
    change, match = WRONG_STATES[state]
    change(model)
    with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=match):
        promoe.patch(model, link=FAST)
    if state in ("quantised with a tensor subclass", "expert parallel", "an expert parallel plan", "strided rows"):
        assert answer(model).logits[0].isfinite().all()  # it runs as it ran before


def test_a_dense_model() -> None:
    model = build("llama")
    with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* has no MoE layers"):
        promoe.patch(model, link=FAST)
    assert answer(model).logits[0].isfinite().all()


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        sizes = {"hidden": 64, "intermediate": 32, "num_experts": 8, "top_k": 2, "layers": 2}
        model = AutoModelForCausalLM.from_config(make_config("qwen2_moe", **sizes)).eval()
    with leaving_untouched(model):
        for link in ("auto", FAST):
            with pytest.raises(UnsupportedModelError, match=r"gate_up_proj' is on the meta device.*from_pretrained"):
                promoe.patch(model, link=link)


def test_patching_twice(model: PreTrainedModel) -> None:
    wanted = answer(model)
    with patched(model):
        handle = model.promoe
        with leaving_untouched(model):
            for whole_or_part in (model, model.model, model.model.layers[1], model.model.layers[1].mlp.experts):
                with pytest.raises(PatchStateError, match=r"is patched already\. Call promoe\.unpatch\(model\) first"):
                    promoe.patch(whole_or_part, link=FAST)
        assert model.promoe is handle
        answer(model).assert_equals(wanted)
    with patched(model.model):
        with leaving_untouched(model), pytest.raises(PatchStateError, match="patched already"):
            promoe.patch(model, link=FAST)
        answer(model).assert_equals(wanted)


def test_patching_twice_where_experts_lie(model: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="used in place"):
        promoe.patch(model)
    with leaving_untouched(model), pytest.raises(PatchStateError, match="patched already"):
        promoe.patch(model, link=FAST)
    promoe.unpatch(model)


# -- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_training_after_patching_is_refused_in_the_forward(implementation: str) -> None:
    model = build("qwen2_moe", experts_implementation=implementation)
    wanted = answer(model)
    with patched(model):
        for mode in (model.train, model.eval):
            mode()
            with pytest.raises(UnsupportedModelError, match=r"gradients enabled.*torch\.no_grad\(\)"):
                model(**PROMPTS["short"])
        answer(model).assert_equals(wanted)


def test_experts_that_alone_would_be_trained_are_refused_too(model: PreTrainedModel) -> None:
    """Neither the hidden states nor the routing weights need a gradient there, but the stock experts would get one."""
    model.requires_grad_(False)
    promoe.find_moe_layers(model)[0].experts.requires_grad_(True)
    assert model(**PROMPTS["short"]).logits.requires_grad
    with patched(model):
        with pytest.raises(UnsupportedModelError, match="gradients enabled"):
            model(**PROMPTS["short"])
        model.requires_grad_(False)
        assert not model(**PROMPTS["short"]).logits.requires_grad


# -- failures while patching ------------------------------------------------------------------------------------


class Injected(Exception):
    pass


class Beside:
    """A predictor that is not quick: it has a thread."""

    def predict(self, visit: Any) -> list[Any]:
        return []


def failing_at(call: int, original: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    """`original`, but its `call`-th call (from 1) fails before it does anything."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("injected")
        return original(*args, **kwargs)

    return wrapper


POINTS: list[tuple[Any, str, int]] = [
    (assembly, "open_link", 1),
    (assembly, "SlotPool", 1),
    (assembly, "Scheduler", 1),
    (assembly, "Engine", 1),
    (threading.Thread, "start", 1),
    (threading.Thread, "start", 2),  # the second link worker: "can't start new thread"
    (threading.Thread, "start", 3),  # the predictor's
    (assembly, "Forecaster", 1),
    (assembly, "Runtime", 1),
    (assembly, "SlotHandle", 1),
    *((attach, "attach", call) for call in (1, 2, 3)),
    *((nn.Module, "register_forward_hook", call) for call in (1, 2, 3, 4)),  # three gates, and the model
    (nn.Module, "register_forward_pre_hook", 1),
    (assembly, "refuse_changes", 1),
    *((nn.Module, "register_load_state_dict_pre_hook", call) for call in (1, 3, 8)),
]


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name", "call"), POINTS, ids=[f"{name}-{call}" for _, name, call in POINTS])
def test_a_failure_while_patching_leaves_nothing_half_patched(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Any
) -> None:
    wanted = answer(model)
    threads = set(threading.enumerate())
    with leaving_untouched(model):
        with monkeypatch.context() as patching:
            patching.setattr(owner, name, failing_at(call, getattr(owner, name), error))
            with pytest.raises(error, match="injected"):
                promoe.patch(model, cache="25%", predictor=Beside(), link=LinkOver(plain_link), config=config())
        assert set(threading.enumerate()) <= threads
        answer(model).assert_equals(wanted)
    with patched(model):
        answer(model).assert_equals(wanted)


def test_the_points_of_failure_are_all_there_are(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function is called at least as often as `POINTS` lets it fail, else a test above would test nothing."""
    calls: dict[str, int] = {}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return wrapper

    for owner, name in {(owner, name) for owner, name, _ in POINTS}:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    with patched(model, predictor=Beside()):
        pass
    assert {name: calls.get(name, 0) >= call for _, name, call in POINTS} == {name: True for _, name, _ in POINTS}


def test_a_failing_undo_step_does_not_keep_the_others_from_running(model: PreTrainedModel) -> None:
    with patched(model):
        model.promoe._undo.callback(failing_at(1, lambda: None, Injected))
        with pytest.raises(Injected):
            promoe.unpatch(model)
        assert not hasattr(model, "promoe")
        assert not any(attach.is_patched(module) for module in model.modules())


# -- where nothing needs to be served ---------------------------------------------------------------------------


def test_without_a_link_experts_are_used_where_they_lie(model: PreTrainedModel) -> None:
    wanted, before = answer(model), snapshot(model)
    with pytest.warns(UserWarning, match=r"used in place.*store=\"disk\".*promoe\.from_pretrained\(path\)") as warned:
        assert promoe.patch(model) is model
    assert len(warned) == 1
    assert warned[0].filename == __file__
    answer(model).assert_equals(wanted)
    assert model.promoe.stats().bytes_demand == 0
    assert "stock forward" in model.promoe.stats().link
    assert not any(attach.is_patched(module) for module in model.modules())
    assert promoe.unpatch(model) is model
    assert_same(before, snapshot(model))


def test_a_cache_of_everything_is_bypassed_unless_that_is_switched_off(model: PreTrainedModel) -> None:
    with patched(model, cache="100%", config=config(bypass=True)):
        assert model.promoe.stats().cache_slots == EXPERTS
        assert not any(attach.is_patched(module) for module in model.modules())
    with patched(model, cache="100%", config=config(bypass=False)):
        assert model.promoe.stats().cache_slots == EXPERTS
        assert sum(attach.is_patched(module) for module in model.modules()) == 3


def test_layers_of_other_shapes_get_their_own_pool_in_proportion() -> None:
    model = build("qwen2_moe", top_k=2)
    wide = build("qwen2_moe", top_k=2, intermediate=64, seed=1)
    model.model.layers[1].mlp = wide.model.layers[1].mlp
    wanted = answer(model)
    with patched(model, cache="25%"):
        assert [pool.num_slots for pool in model.promoe._pools] == [4, 2]
        answer(model).assert_equals(wanted)
    with leaving_untouched(model), pytest.raises(ConfigError, match=r"one expert of each shape.*Try cache=\"13%\""):
        promoe.patch(model, cache="12%", link=FAST)


# -- unwritable output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [False, True], ids=["served", "bypassed"])
def test_an_unwritable_timeline_is_refused_before_anything_runs(
    model: PreTrainedModel, tmp_path: Path, everything: bool
) -> None:
    wanted = answer(model)
    (tmp_path / "file").write_text("old")
    with patched(model, cache="100%" if everything else "25%", config=config(bypass=everything)):
        for path, reason in (
            (tmp_path / "absent" / "t.json", r"the folder '.*absent' does not exist"),
            (tmp_path, "it is a folder"),
            (tmp_path / "file" / "t.json", "the folder '.*file' does not exist"),
            (tmp_path / ("x" * 300), "name too long"),
        ):
            with pytest.raises(ConfigError, match=f"Cannot write .*{reason}"):
                model.promoe.trace(path).__enter__()
        answer(model).assert_equals(wanted)
        with model.promoe.trace(tmp_path / "t.json"):
            answer(model).assert_equals(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t.json"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_that_vanishes_while_a_timeline_is_recorded(model: PreTrainedModel, tmp_path: Path) -> None:
    wanted = answer(model)
    folder = tmp_path / "soon gone"
    folder.mkdir()
    with patched(model):
        recording = model.promoe.trace(folder / "t.json")
        recording.__enter__()
        answer(model)
        folder.rmdir()
        with pytest.raises(ConfigError, match="soon gone' does not exist"):
            recording.__exit__(None, None, None)
        answer(model).assert_equals(wanted)
        with model.promoe.trace(tmp_path / "t.json"):  # it can be tried again
            with pytest.raises(PatchStateError, match="recorded already"):
                model.promoe.trace(tmp_path / "u.json").__enter__()
            answer(model).assert_equals(wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("model", ["a folder", None, 5])
def test_what_is_no_model_is_refused(model: Any) -> None:
    for call in (promoe.patch, promoe.find_moe_layers):
        with pytest.raises(ConfigError, match=r"The model must be a torch\.nn\.Module, .*promoe\.from_pretrained"):
            call(model)
