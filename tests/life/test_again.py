"""One model after another, twice the same, and its end: whatever is patched can be let go."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import config
from torch import nn
from untouched import leaving_untouched, open_files, opened_since

import promoe
from life.models import FAMILIES, SOME_FAMILIES, ask, assert_unharmed, build, differs, open_tiny, opened, patch, patched
from promoe import EmulatedLink
from promoe.experts.moe_layers import find_moe_layers
from promoe.model import attach
from promoe.predictors import LayerVisit
from promoe.runtime import assembly, prediction


class Beside:
    """A predictor that is not quick: it has a thread, and remembers what it saw."""

    def predict(self, visit: LayerVisit) -> list[Any]:
        self.visit = visit
        return []


# -- two models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_two_models_of_one_configuration(family: str) -> None:
    """One of them patched: of the other nothing is changed, and both answer right."""
    model = build(family)
    other = type(model)(model.config).eval()
    other.load_state_dict(build(family, seed=1).state_dict())
    assert other.config is model.config
    expected, others = ask(model), ask(other)
    assert differs(expected, others)
    with leaving_untouched(other), patched(model):
        assert not any(map(attach.is_patched, other.modules()))
        assert_unharmed(model, expected)
        assert_unharmed(other, others)
        assert_unharmed(model, expected)
    with patched(other):
        assert not any(map(attach.is_patched, model.modules()))
        assert_unharmed(other, others)
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_a_choice_that_two_models_share(family: str) -> None:
    """The experts implementation is of the configuration, for the patched and the other one."""
    model = build(family)
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with patched(model):
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            other.set_experts_implementation(implementation)
            assert_unharmed(model, ask(other))


def test_two_patched_models_by_turns() -> None:
    """They share nothing, not even if one is unpatched before the other."""
    first, second = build("qwen2_moe"), build("qwen2_moe", seed=1)
    expected = ask(first), ask(second)
    with patched(second):
        with patched(first):
            for _ in range(2):
                assert_unharmed(first, expected[0])
                assert_unharmed(second, expected[1])
        assert_unharmed(second, expected[1])
    assert_unharmed(first, expected[0])


# -- again ------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"predictor": None, "config": config(eviction="lru")},
    {"predictor": Beside(), "config": config(eviction="lfru", chunk_bytes=4096)},
    {"cache": "75%", "predictor": "popularity", "config": config(early_preemption=False)},
    {"cache": "100%", "predictor": "previous"},
    {"link": EmulatedLink(bandwidth_bytes_per_s=1e12), "config": config(reorder=False)},
]


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_patched_again_with_other_settings(family: str) -> None:
    """Each time as if it were the first."""
    model = build(family)
    expected = ask(model)
    threads = set(threading.enumerate())
    with leaving_untouched(model):
        for settings in SETTINGS:
            with patched(model, **settings):
                assert model.promoe.stats().layer_visits == 0
                assert_unharmed(model, expected)
                assert model.promoe.stats().layer_visits > 0
            assert set(threading.enumerate()) <= threads
    assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_files_to_memory_and_patched_again(family: str) -> None:
    """What was opened becomes an ordinary model, and that can be served from its memory."""
    with opened(family) as model:
        expected = ask(model)
        promoe.unpatch(model)
        assert_unharmed(model, expected)
        with leaving_untouched(model), patched(model):
            assert_unharmed(model, expected)


PLACES: dict[str, Callable[[Any], tuple[nn.Module, bool]]] = {
    "before the gate": lambda layer: (layer.gate, True),
    "between gate and experts": lambda layer: (layer.experts, True),
    "after the experts": lambda layer: (layer.experts, False),
    "after the block": lambda layer: (layer.block, False),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["qwen2_moe", "dbrx"])
def test_unpatching_after_a_forward_that_failed(family: str, place: str) -> None:
    """Wherever and however it failed, everything is undone; or it goes on."""
    model = build(family)
    expected = ask(model)
    for error, unpatch_at_once in ((RuntimeError, False), (KeyboardInterrupt, True)):
        with leaving_untouched(model), patched(model):
            module, before = PLACES[place](find_moe_layers(model)[1])
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            hook = register(raising(error))
            with pytest.raises(error, match="here"):
                ask(model)
            hook.remove()
            if unpatch_at_once:
                promoe.unpatch(model)
            assert_unharmed(model, expected)


def raising(error: type[BaseException]) -> Callable[..., None]:
    """A hook that fails."""

    def hook(*args: Any) -> None:
        raise error("here")

    return hook


# -- the end ----------------------------------------------------------------------------------------------------


def end_of(threads: set[threading.Thread]) -> None:
    """Wait until all our threads but `threads` have ended."""
    for _ in range(1200):
        gc.collect()  # a thread may have held it a moment ago
        ours = [one for one in set(threading.enumerate()) - threads if one.name.startswith("promoe-")]
        if not ours:
            return
        ours[0].join(0.1)
    raise AssertionError(f"still running: {ours}")


def parts_of(model: Any) -> dict[str, weakref.ref[Any]]:
    """What costs something, and what would keep it alive."""
    handle = model.promoe
    parts = {
        "model": model,
        "experts": find_moe_layers(model)[0].experts,
        "handle": handle,
        "runtime": handle.runtime,
        "engine": handle.runtime.engine,
        "store": handle._store,
        "slots": handle._pools[0]._regions[0],
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(parts: dict[str, weakref.ref[Any]]) -> list[str]:
    """Which of them are."""
    return [name for name, part in parts.items() if part() is not None]


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """What there is already need not be looked at by every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def quick_collection(frozen: None) -> Iterator[None]:
    """Only what the tests here make is collected, and only when they ask for that."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("predictor", [None, "gate", Beside], ids=["none", "quick", "beside"])
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_a_patched_model_that_nobody_holds_any_more(in_files: bool, predictor: Any) -> None:
    """Its threads end, its files are closed, its memory is given back: no thread of ours keeps what it works for."""
    threads, files = set(threading.enumerate()), open_files()
    chosen = predictor() if predictor is Beside else predictor
    model = open_tiny("qwen2_moe", predictor=chosen) if in_files else patch(build("qwen2_moe"), predictor=chosen)
    ask(model)
    parts = parts_of(model)
    gc.collect()
    assert alive(parts) == list(parts), "it is still held"
    ask(model)
    del model, chosen
    end_of(threads)
    gc.collect()  # what poisons free slots refers to them
    assert alive(parts) == []
    assert not opened_since(files)


@pytest.mark.usefixtures("quick_collection")
def test_a_model_that_is_held_by_its_handle_alone() -> None:
    """The handle answers, and then lets go too."""
    threads = set(threading.enumerate())
    model = patch(build("qwen2_moe"))
    ask(model)
    handle, parts = model.promoe, parts_of(model)
    del model
    gc.collect()
    assert handle.stats().layer_visits > 0
    assert "slots for 24 experts" in handle.report()
    del handle
    end_of(threads)
    gc.collect()  # what poisons free slots refers to them
    assert alive(parts) == []


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatching_gives_memory_back_at_once(family: str) -> None:
    """The slots' at least, without the garbage collector, also if the handle is kept."""
    model = build(family)
    with patched(model):
        ask(model)
        handle, parts = model.promoe, parts_of(model)
    assert "slots" not in alive(parts)
    assert not any(thread.name.startswith("promoe-") for thread in threading.enumerate())
    del handle
    gc.collect()
    assert alive(parts) == ["model", "experts"]


@pytest.mark.usefixtures("quick_collection")
def test_what_ends_a_forgotten_model_is_called_off_by_unpatching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread would start for nothing, some time."""
    ended: list[object] = []
    monkeypatch.setattr(assembly, "_close", lambda *parts: ended.append(parts))
    monkeypatch.setattr(prediction, "_wake", ended.append)
    threads = set(threading.enumerate())
    model = build("qwen2_moe")
    with patched(model, predictor=Beside()):
        ask(model)
    del model
    gc.collect()
    end_of(threads)
    assert not ended


@pytest.mark.usefixtures("quick_collection")
def test_a_wrapper_around_a_model_does_not_keep_it() -> None:
    """Both have the handle."""
    threads = set(threading.enumerate())
    model = nn.Sequential(build("qwen2_moe")).eval()
    promoe.patch(model, cache="25%", link=EmulatedLink(bandwidth_bytes_per_s=1e12), config=config())
    assert model.promoe is model[0].promoe
    ask(model[0])
    parts = parts_of(model)
    del model
    end_of(threads)
    gc.collect()  # what poisons free slots refers to them
    assert alive(parts) == []
