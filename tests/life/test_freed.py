"""A served model goes as soon as nobody has it any more, as the unmodified one does: no garbage collection is waited for."""

from __future__ import annotations

import copy
import gc
import io
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from needs import needs_packing
from served import LinkOver, checkpoint, config, greedy, load_stock, plain_link, predictor_of
from tiny_checkpoint import write_checkpoint
from tiny_models import build, left_padded, token_ids
from torch import nn
from waiting import until
from zoo.exactness import outputs
from zoo.families import build as build_zoo
from zoo.families import inputs, names

import promoe
from promoe.commands.pack import options as pack
from promoe.commands.pack.command import run_pack

FAMILY = "qwen3_moe"
PROMPT = {"input_ids": token_ids(1, 6, seed=1), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened(**arguments: Any) -> Make:
    return lambda: promoe.from_pretrained(checkpoint(FAMILY), **({"cache": "50%"} | arguments))


def patched(**arguments: Any) -> Make:
    return lambda: promoe.patch(load_stock(checkpoint(FAMILY)), **({"cache": "50%"} | arguments))


def spooled() -> nn.Module:
    return promoe.patch(build(FAMILY), store="disk", cache="50%")


def with_predictor(name: str) -> Make:
    def make() -> nn.Module:
        model = load_stock(checkpoint(FAMILY))
        return promoe.patch(
            model, link=LinkOver(plain_link), predictor=predictor_of(name, model, [], 2), config=config()
        )

    return make


def inside_a_module() -> nn.Module:
    """What adapters do: a module of somebody else's around the model."""
    outer = nn.ModuleDict({"base": load_stock(checkpoint(FAMILY))}).eval()
    return promoe.patch(outer, link=LinkOver(plain_link))


MODES: dict[str, Make] = {
    "opened": opened(),
    "opened, strict": opened(config=config()),
    "opened, no predictor": opened(predictor=None),
    "opened, all experts have room": opened(cache="100%"),
    "opened, all experts have slots": opened(cache="100%", config=config()),
    "opened, in another dtype": opened(dtype=torch.bfloat16),
    "patched, used where they lie": patched(),
    "patched, from slots": patched(link=LinkOver(plain_link)),
    "patched, offloaded": patched(store="disk"),
    "patched, spooled": spooled,
    "patched, trained predictor": with_predictor("trained"),
    "patched, oracle": with_predictor("oracle"),
    "inside a module": inside_a_module,
}


def closed(model: nn.Module) -> None:
    model.promoe.close()


def unpatched(model: nn.Module) -> None:
    promoe.unpatch(model)


def used_in_every_way(model: nn.Module) -> None:
    handle = model.promoe
    with handle.trace():
        ask(model)
    handle.report()
    handle.reset_stats()
    if hasattr(handle, "runtime"):
        handle.resize("75%")
        handle.warm([[1.0] * 8] * 3)
    ask(model)


ENDS = {"let go": lambda model: None, "closed": closed, "unpatched": unpatched, "used": used_in_every_way}


def ask(model: nn.Module) -> None:
    inner = model["base"] if isinstance(model, nn.ModuleDict) else model
    greedy(inner, PROMPT)
    greedy(inner, left_padded((5, 2), seed=1), new_tokens=1)


def watch(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    """All modules of a model, and all that serves it."""
    found: dict[str, Any] = {f"module {name!r}": module for name, module in model.named_modules()}
    if (handle := getattr(model, "promoe", None)) is not None:
        found["handle"] = handle
    if (runtime := getattr(handle, "runtime", None)) is not None:
        found |= {"runtime": runtime, "engine": runtime.engine, "scheduler": runtime.engine.scheduler}
        found |= {f"slots {number}": pool for number, pool in enumerate(runtime.engine.pools)}
    return {name: weakref.ref(part) for name, part in found.items()}


def left(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, ref in watched.items() if ref() is not None]


def descriptors() -> list[str]:
    """Of files that this process has open. Others (pipes, the test runner's) come and go."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the folder itself
            continue
    return sorted(name for name in found if name.startswith("/") and not name.startswith(("/dev", "/proc")))


def promoe_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("promoe-")]


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:The model is in RAM")
def test_a_model_and_all_that_serves_it_go_with_its_last_name(mode: str, end: str) -> None:
    before = descriptors()
    model = MODES[mode]()
    ask(model)
    ENDS[end](model)
    watched = watch(model)
    del model
    until(lambda: not left(watched), lambda: f"still there: {left(watched)}")
    until(lambda: not promoe_threads(), lambda: f"threads: {promoe_threads()}")
    assert descriptors() == before


@needs_packing
def test_a_model_with_packed_experts_goes_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", chat=False, hidden=128, intermediate=64)
    run_pack(pack.Options(str(folder)), io.StringIO())
    before = descriptors() if sys.platform == "linux" else []
    for end in ENDS.values():
        model = promoe.from_pretrained(folder, cache="60%")
        assert model.promoe.stats().store == "SlotFilesStore, packed"
        ask(model)
        end(model)
        watched = watch(model)
        del model
        until(lambda watched=watched: not left(watched), lambda watched=watched: f"still there: {left(watched)}")
        until(lambda: not promoe_threads())
    assert (descriptors() if sys.platform == "linux" else []) == before


def cut_files(model: nn.Module, folder: Path) -> None:
    """Reads fail, in link workers and in the forward's own thread."""
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 1000)
    for _ in range(2):
        with pytest.raises(promoe.PromoeError):
            ask(model)


def interrupt_a_change(model: nn.Module, folder: Path) -> None:
    """Ctrl-C in the midst of a change of the scheduler's state."""
    scheduler = model.promoe.runtime.engine.scheduler

    def torn(*args: Any) -> Any:
        raise KeyboardInterrupt

    scheduler.begin_visit = torn
    with pytest.raises(KeyboardInterrupt):
        ask(model)
    assert model.promoe.runtime.engine.torn


@pytest.mark.parametrize("end", ["let go", "closed"])
@pytest.mark.parametrize("predictor", ["gate", None])
@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
@pytest.mark.parametrize("accident", [cut_files, interrupt_a_change])
def test_a_model_goes_also_after_an_accident(
    accident: Callable[[nn.Module, Path], None], read_mode: Any, predictor: str | None, end: str, tmp_path: Path
) -> None:
    """What failed is kept to be told, without the stack that holds the model."""
    shutil.copytree(checkpoint(FAMILY), tmp_path, dirs_exist_ok=True)
    config = promoe.PromoeConfig(read_mode=read_mode)
    model = promoe.from_pretrained(tmp_path, cache="50%", predictor=predictor, config=config)
    accident(model, tmp_path)
    ENDS[end](model)
    watched = watch(model)
    del model
    until(lambda: not left(watched), lambda: f"still there: {left(watched)}")
    until(lambda: not promoe_threads(), lambda: f"threads: {promoe_threads()}")


@pytest.mark.parametrize("name", names())
def test_a_model_of_every_family_goes_as_the_unmodified_one_does(name: str) -> None:
    model = build_zoo(name)
    stock = copy.deepcopy(model)
    tokens = inputs(name, model)
    outputs(stock, tokens)
    of_stock = watch(stock)
    del stock
    promoe.patch(model, cache="40%", link=LinkOver(plain_link), config=config())
    outputs(model, tokens)
    watched = watch(model)
    del model
    until(lambda: not promoe_threads() or left(of_stock), lambda: f"threads: {promoe_threads()}, left: {left(watched)}")
    # A family whose own modules hold one another waits for a collection, patched or not.
    assert {part for part in left(watched) if part.startswith("module")} <= set(left(of_stock))
    if not left(of_stock):
        until(lambda: not left(watched), lambda: f"still there: {left(watched)}")


@pytest.mark.parametrize("arguments", [{"cache": "50%"}, {"cache": "100%"}, {"cache": "50%", "store": "disk"}])
def test_a_model_on_a_device_goes_too(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoe.runtime.checking, "open_device", lambda device: FakeDevice())
    model = promoe.patch(load_stock(checkpoint(FAMILY)), device="cuda", **arguments)
    ask(model)
    watched = watch(model)
    del model
    until(lambda: not left(watched), lambda: f"still there: {left(watched)}")
    until(lambda: not promoe_threads())


def test_a_part_that_is_kept_goes_on_working() -> None:
    """Whoever keeps the decoder keeps what serves it; the handle was the whole model's."""
    model = MODES["opened"]()
    decoder = model.model
    with torch.inference_mode():
        expected = decoder(**PROMPT).last_hidden_state
    watched = watch(decoder)
    del model
    with torch.inference_mode():
        assert torch.equal(decoder(**PROMPT).last_hidden_state, expected)
    del decoder
    until(lambda: not left(watched), lambda: f"still there: {left(watched)}")
    until(lambda: not promoe_threads())


def test_a_gate_that_is_kept_alone_computes_on() -> None:
    model = MODES["opened"]()
    gate, another = model.model.layers[0].mlp.gate, model.model.layers[1]
    hidden = torch.randn(3, 64)
    del model
    with torch.no_grad():
        assert gate(hidden) is not None
    del gate, another
    until(lambda: not promoe_threads())


def test_a_shallow_copy_says_what_it_lacks() -> None:
    model = MODES["opened"]()
    shallow = copy.copy(model)
    del model
    with pytest.raises(
        promoe.PatchStateError, match=r"shallow copy of a patched model that was deleted.*Keep the model"
    ):
        shallow.to("cpu")
    del shallow
    until(lambda: not promoe_threads())


def test_a_handle_that_is_kept_says_that_its_model_is_gone() -> None:
    model = MODES["opened"]()
    handle, layer = model.promoe, promoe.find_moe_layers(model)[0].released()
    del model
    assert handle.stats().cache_slots == 12
    with pytest.raises(promoe.PatchStateError, match=r"'model\.layers\.0\.mlp\.experts' is gone\. Keep the model"):
        layer.experts  # noqa: B018
    handle.close()


def test_a_model_that_could_not_be_patched_goes_too(tmp_path: Path) -> None:
    model = load_stock(checkpoint(FAMILY))

    class BrokenLink(LinkOver):
        def __init__(self) -> None:
            super().__init__(plain_link)

        def bind(self, store: Any, **kwargs: Any) -> Any:
            raise LookupError("no link")

    with pytest.raises(LookupError, match="no link"):
        promoe.patch(model, link=BrokenLink())
    watched = watch(model)
    del model
    assert left(watched) == []


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("end", ["let go", "closed"])
def test_opening_again_and_again_takes_no_more_memory(end: str, tmp_path: Path) -> None:
    build(FAMILY, hidden=256, layers=2, vocab_size=4096).save_pretrained(tmp_path)
    other_bytes = 2 * 4096 * 256 * 4  # what is not experts: embeddings above all

    def once() -> None:
        model = promoe.from_pretrained(tmp_path, cache="50%")
        greedy(model, PROMPT, new_tokens=1)
        ENDS[end](model)
        del model
        until(lambda: not promoe_threads())

    for _ in range(3):  # what is allocated once
        once()
    before_bytes, before_files = resident_bytes(), descriptors()
    for _ in range(20):
        once()
    grown_bytes = resident_bytes() - before_bytes
    assert grown_bytes < 10 * other_bytes, f"{grown_bytes} bytes more after 20 models of {other_bytes}"
    assert descriptors() == before_files


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
