"""`from_pretrained`: served from files, experts never all in memory; and checkpoints that are not sound."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPTS, Outputs, check_integrity, checkpoint, close, config, expected, greedy, load_stock, stock
from stores.checkpoints import rewrite, save, shards
from tiny_models import build
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from untouched import leaving_untouched, open_files, opened_since, snapshot

import promoe
from promoe import EmulatedLink, PromoeConfig
from promoe.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    ExpertLoadError,
    PatchStateError,
    UnsupportedModelError,
)
from promoe.experts.guard import is_guard
from promoe.model import attach, restoring
from promoe.runtime import assembly

FAMILY = "qwen2_moe"
EXPERTS, EXPERT_BYTES = 24, 24576  # of the tiny model in fp32, in three layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several shards that may be harmed."""
    return Path(shutil.copytree(checkpoint(FAMILY), tmp_path / "checkpoint"))


@contextmanager
def opened(folder: Path, **arguments: Any) -> Iterator[PreTrainedModel]:
    """Served from two slots, unless said otherwise, until the context ends."""
    model = promoe.from_pretrained(folder, **({"cache": 2 * EXPERT_BYTES, "config": config()} | arguments))
    try:
        yield model
    finally:
        if hasattr(model, "promoe") and hasattr(model.promoe, "runtime"):
            close(model)


def wanted(prompt: str = "one") -> Outputs:
    return expected(FAMILY, torch.float32, "grouped_mm", prompt)


def guards(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_guard(parameter)]


# -- what is opened ---------------------------------------------------------------------------------------------


def test_experts_stay_in_the_files(folder: Path) -> None:
    with opened(folder) as model:
        greedy(model, PROMPTS["one"]).assert_equals(wanted())
        assert not model.training
        assert guards(model) == [name for name, _ in model.named_parameters() if ".experts." in name]
        stats = model.promoe.stats()
        assert (stats.cache_slots, stats.cache_bytes, stats.store) == (2, 2 * EXPERT_BYTES, "FileStore")
        in_memory = sum(parameter.nbytes for parameter in model.parameters() if not is_guard(parameter))
        assert in_memory + EXPERTS * EXPERT_BYTES == sum(parameter.nbytes for parameter in stock(FAMILY).parameters())


def test_layers_of_a_served_model_can_be_looked_at(folder: Path) -> None:
    with opened(folder) as model:
        layers = promoe.find_moe_layers(model)
        assert [layer.name for layer in layers] == [layer.name for layer in promoe.find_moe_layers(stock(FAMILY))]
        assert [layer.layout for layer in layers] == [layer.layout for layer in promoe.find_moe_layers(stock(FAMILY))]


@pytest.mark.parametrize("link", ["auto", "file", EmulatedLink(1e12)], ids=["auto", "file", "emulated"])
@pytest.mark.parametrize("read_mode", ["auto", "page_cache", "direct"])
def test_every_link_gives_the_same_bits(folder: Path, link: Any, read_mode: Any) -> None:
    with opened(folder, link=link, config=config(read_mode=read_mode), predictor=None) as model:
        greedy(model, PROMPTS["padded"]).assert_equals(wanted("padded"))
        check_integrity(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_another_dtype_is_converted_as_transformers_does(folder: Path, dtype: Any) -> None:
    plain = load_stock(folder, dtype=dtype)
    with opened(folder, dtype=dtype) as model:
        assert model.dtype == plain.dtype != torch.float32
        greedy(model, PROMPTS["one"]).assert_equals(greedy(plain, PROMPTS["one"]))


def test_a_cache_of_everything_is_simply_loaded(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    files = open_files()
    with opened(
        folder, cache="100%", config=PromoeConfig(), progress=lambda done, total: seen.append((done, total))
    ) as model:
        assert not opened_since(files)
        assert not guards(model)
        assert not any(attach.is_patched(module) for module in model.modules())
        assert seen[-1] == (EXPERTS * EXPERT_BYTES, EXPERTS * EXPERT_BYTES)
        greedy(model, PROMPTS["one"]).assert_equals(wanted())
        assert model.promoe.stats().bytes_demand == 0
        promoe.unpatch(model)
        assert_like_stock(model)


def test_the_bypass_can_be_switched_off(folder: Path) -> None:
    with opened(folder, cache="100%", config=config(bypass=False)) as model:
        assert len(guards(model)) == 6
        greedy(model, PROMPTS["one"]).assert_equals(wanted())


# -- undoing ----------------------------------------------------------------------------------------------------


def assert_like_stock(model: PreTrainedModel) -> None:
    """Everything is as after a plain load: weights, names, classes, hooks, what requires a gradient."""
    plain = stock(FAMILY)
    assert not hasattr(model, "promoe")
    assert type(model) is type(plain)
    ours, theirs = model.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert type(ours[name]) is type(tensor), name
        assert (ours[name].requires_grad, ours[name].is_inference()) == (tensor.requires_grad, False), name
    for (name, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        assert type(module) is type(other), name
        assert list(module.__dict__) == list(other.__dict__), name
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert not module._load_state_dict_pre_hooks, name
    greedy(model, PROMPTS["one"]).assert_equals(wanted())


@pytest.mark.parametrize("closed_first", [False, True])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_unpatch_loads_the_experts(folder: Path, closed_first: bool, inference_mode: bool) -> None:
    files = open_files()
    with opened(folder, predictor="gate") as model:
        greedy(model, PROMPTS["one"]).assert_equals(wanted())
        if closed_first:
            model.promoe.close()
            with pytest.raises(EngineClosedError):
                greedy(model, PROMPTS["one"])
        with torch.inference_mode(inference_mode):
            assert promoe.unpatch(model) is model
        model.set_experts_implementation("grouped_mm")
        assert_like_stock(model)
    assert not opened_since(files)


def test_an_unpatched_model_can_be_patched_trained_and_saved(folder: Path, tmp_path: Path) -> None:
    with opened(folder) as model:
        promoe.unpatch(model)
        promoe.patch(model, cache=1 * EXPERT_BYTES, link=EmulatedLink(1e12), config=config())
        greedy(model, PROMPTS["one"]).assert_equals(wanted())
        promoe.unpatch(model)
        model(**PROMPTS["one"]).logits.sum().backward()
        assert promoe.find_moe_layers(model)[0].experts.down_proj.grad is not None
        model.save_pretrained(tmp_path / "saved")
    greedy(load_stock(tmp_path / "saved"), PROMPTS["one"]).assert_equals(wanted())


def test_patching_what_was_opened_is_refused(folder: Path) -> None:
    with opened(folder) as model:
        before = snapshot(model)
        with pytest.raises(PatchStateError, match="patched already"):
            promoe.patch(model, link=EmulatedLink(1e12))
        assert snapshot(model) == before
        greedy(model, PROMPTS["one"]).assert_equals(wanted())


# -- files that change under an open model ----------------------------------------------------------------------


def test_a_file_that_is_cut_off_while_it_is_served(folder: Path) -> None:
    """The forward that needs the lost bytes raises, naming them; mended, everything goes on, and unpatch too."""
    kept = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards(folder)}
    with opened(folder, cache="25%", predictor="gate", config=config(read_mode="page_cache")) as model:
        greedy(model, PROMPTS["one"]).assert_equals(wanted())
        for shard in kept:
            os.truncate(shard, 4096)
        before = snapshot(model)
        with pytest.raises(ExpertLoadError, match=r"Expert \d of MoE layer \d could not be fetched.*safetensors"):
            greedy(model, PROMPTS["padded"])
        with pytest.raises(CheckpointError, match=r"experts of 'model\.layers\.0\.mlp\.experts' could not be read"):
            promoe.unpatch(model)
        assert snapshot(model) == before
        for shard, (content, modified_ns) in kept.items():
            with shard.open("r+b") as file:  # the same file: replacing it would not reach the open one
                file.write(content)
            os.utime(shard, ns=(modified_ns, modified_ns))
        greedy(model, PROMPTS["padded"]).assert_equals(wanted("padded"))
        check_integrity(model)
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_like_stock(model)


def test_files_that_are_removed_while_they_are_served(folder: Path) -> None:
    with opened(folder) as model:
        shutil.rmtree(folder)
        greedy(model, PROMPTS["one"]).assert_equals(wanted())


# -- bad input --------------------------------------------------------------------------------------------------


def assert_refused(folder: Path | str, error: type[Exception], match: str, **arguments: Any) -> None:
    """It raises, and neither threads nor open files stay behind."""
    files, threads = open_files(), own_threads()
    with pytest.raises(error, match=match):
        promoe.from_pretrained(folder, **({"cache": "25%", "config": config()} | arguments))
    assert not opened_since(files)
    assert own_threads() <= threads


def own_threads() -> set[threading.Thread]:
    """All threads but those of transformers' loader, whose pool ends when the garbage collector comes by."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")}


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"cache": "half"}, r"'cache' argument must be a size .*Got 'half'"),
    ({"cache": 0}, r"'cache' argument must be a size .*Got 0"),
    ({"cache": None}, r"'cache' argument must be a size .*Got None"),
    ({"predictor": "crystal ball"}, r"'predictor' argument .*Got 'crystal ball'"),
    ({"link": "carrier pigeon"}, r"'link' argument .*Got 'carrier pigeon'"),
    ({"device": "mps"}, r"'device' argument must be \"cpu\" or \"cuda\".*Got 'mps'"),
]


@pytest.mark.parametrize(("arguments", "match"), WRONG_ARGUMENTS, ids=lambda value: str(value)[:30])
def test_wrong_arguments_are_refused_before_anything_is_opened(arguments: dict[str, Any], match: str) -> None:
    assert_refused("no/such/folder", ConfigError, match, **arguments)


def test_a_cache_that_is_too_small_for_the_model(folder: Path) -> None:
    match = rf"at least 24\.0 KiB = {EXPERT_BYTES} bytes .*Got {EXPERT_BYTES - 1} = .*Try cache=\"5%\""
    assert_refused(folder, ConfigError, match, cache=EXPERT_BYTES - 1)
    with opened(folder, cache=EXPERT_BYTES) as model:
        assert model.promoe.stats().cache_slots == 1


def cut(folder: Path) -> str:
    shard = shards(folder)[3]
    size_bytes = shard.stat().st_size
    os.truncate(shard, size_bytes // 2)
    return rf"{shard.name} .*expected {size_bytes} bytes .*, found {size_bytes // 2} bytes \(truncated"


def remove(folder: Path) -> str:
    gone = shards(folder)[2]
    gone.unlink()
    return f"{gone.name}: No such file"


def expert_of_another_shape(folder: Path) -> str:
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    for shard in shards(folder):
        rewrite(shard, lambda tensors: tensors.update({name: torch.zeros(64, 31)}) if name in tensors else None)
    return rf"'{re.escape(name)}' has shape \[64, 31\], but \[64, 32\] was expected"


def expert_missing(folder: Path) -> str:
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    for shard in shards(folder):
        rewrite(shard, lambda tensors: tensors.pop(name, None))
    return "needs 8: missing expert 7"


def other_sizes(folder: Path) -> str:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"num_experts": 8', '"num_experts": 16'))
    return r"needs 16: missing expert 8"


@pytest.mark.parametrize("harm", [cut, remove, expert_of_another_shape, expert_missing, other_sizes])
def test_files_that_do_not_hold_the_model(folder: Path, harm: Callable[[Path], str]) -> None:
    assert_refused(folder, CheckpointError, harm(folder))
    with opened(checkpoint(FAMILY)) as model:  # the next one is opened as if nothing had been
        greedy(model, PROMPTS["short"]).assert_equals(wanted("short"))


def test_files_that_changed_places_are_read_as_their_headers_say(folder: Path) -> None:
    """As after a careless copy, which leaves the index wrong; the unmodified model opens it, too."""
    first, second = shards(folder)[1:3]
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with opened(folder) as model:
        greedy(model, PROMPTS["short"]).assert_equals(wanted("short"))


def test_a_dense_checkpoint(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    assert_refused(tmp_path, UnsupportedModelError, r"LlamaForCausalLM .* has no MoE layers")


def test_quantised_experts(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    save(tmp_path)
    rewrite(shards(tmp_path)[0], quantise)
    assert_refused(tmp_path, CheckpointError, "has dtype F8_E4M3")


def test_nothing_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", CheckpointError, "There is no folder .*absent")
    assert_refused(tmp_path, CheckpointError, r"has no config\.json")
    assert_refused("", CheckpointError, "There is no folder ''")


def test_an_implementation_that_cannot_be_served(folder: Path) -> None:
    files = open_files()
    with pytest.raises((UnsupportedModelError, ValueError), match="deepgemm"):
        promoe.from_pretrained(folder, cache="25%", config=config(), experts_implementation="deepgemm")
    assert not opened_since(files)


def test_training_a_served_model_is_refused(folder: Path) -> None:
    with opened(folder) as model:
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"gradients enabled.*torch\.no_grad\(\)"):
            model(**PROMPTS["one"])
        model.eval()
        greedy(model, PROMPTS["one"]).assert_equals(wanted())


def test_an_unwritable_timeline(folder: Path, tmp_path: Path) -> None:
    with opened(folder) as model:
        with pytest.raises(ConfigError, match=r"the folder '.*absent' does not exist"):
            model.promoe.trace(tmp_path / "absent" / "t.json").__enter__()
        with model.promoe.trace(tmp_path / "t.json"):
            greedy(model, PROMPTS["one"]).assert_equals(wanted())
        assert (tmp_path / "t.json").stat().st_size > 1000


# -- failures after the checkpoint was opened -------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "point", ["open_link", "SlotPool", "Engine", "Forecaster", "Runtime", "SlotHandle", "attach.attach"]
)
def test_a_failure_leaves_no_file_and_no_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, point: str, error: type[BaseException]
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise error("injected")

    with monkeypatch.context() as patching:
        if point == "attach.attach":
            patching.setattr(attach, "attach", failing)
        else:
            patching.setattr(assembly, point, failing)
        assert_refused(folder, error, "injected")
    with opened(folder) as model:
        greedy(model, PROMPTS["short"]).assert_equals(wanted("short"))


def test_a_failing_read_while_everything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(restoring, "read_expert", failing)
    match = r"experts of 'model\.layers\.0\.mlp\.experts' could not be read: .*Input/output error"
    assert_refused(folder, CheckpointError, match, cache="100%", config=PromoeConfig())


def test_opening_leaves_other_models_alone(folder: Path) -> None:
    with leaving_untouched(stock(FAMILY)), opened(folder) as model:
        greedy(model, PROMPTS["short"])


def test_closing_lets_the_slots_go(folder: Path) -> None:
    model = promoe.from_pretrained(folder, cache="50%")
    with torch.no_grad():
        model(torch.arange(5)[None])
    slots = [weakref.ref(pool._regions[0]._mapping) for pool in model.promoe.runtime.engine.pools]
    gc.disable()  # it is not to be what does it
    try:
        model.promoe.close()
        assert slots
        assert not [slot for slot in slots if slot() is not None]
    finally:
        gc.enable()
    promoe.unpatch(model)
    with torch.no_grad():
        model(torch.arange(5)[None])


@pytest.mark.parametrize("config", [{"bypass": False}, promoe.PromoeConfig, AutoConfig.for_model("qwen2_moe")])
def test_other_settings_than_ours(folder: Path, config: Any) -> None:
    with pytest.raises(ConfigError, match=r"The 'config' argument must be a promoe\.PromoeConfig"):
        promoe.from_pretrained(folder, config=config)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"The 'config' argument must be a promoe\.PromoeConfig"):
        promoe.patch(model, config=config)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((None,), "'path_or_id' argument must be a folder"),
        (("somewhere", {"experts": True}), "'experts' argument must be"),
        (("somewhere", {"progress": 3}), "'progress' argument must be a function of two numbers. Got 3"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments: tuple[Any, ...], match: str) -> None:
    path, *options = arguments
    with pytest.raises(ConfigError, match=match):
        promoe.from_pretrained(path, **(options[0] if options else {}))
