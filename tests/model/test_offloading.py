"""`patch(store="disk")`: experts that were in memory are served from files, and come back; never others than the model's."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from huggingface_hub import constants
from served import PROMPTS, Outputs, check_integrity, checkpoint, config, greedy, load_stock
from stores.checkpoints import shards
from tiny_models import build
from transformers import PreTrainedModel
from untouched import leaving_untouched, open_files, opened_since, snapshot
from waiting import until

import promoe
from promoe.errors import CheckpointError, ConfigError, PatchStateError, PromoeError, UnsupportedModelError
from promoe.experts.guard import is_guard
from promoe.model import attach, offloading
from promoe.model.offloading import checkpoint_folder, first_difference
from promoe.runtime import assembly, checking, finding, serving, sizes, slot_plan
from promoe.scheduler import ExpertKey
from promoe.stores import HostStore
from promoe.stores.open_files import OPEN_FILES

FAMILY = "qwen2_moe"
EXPERT_BYTES = 24576  # of the tiny model in fp32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several shards that may be harmed."""
    return Path(shutil.copytree(checkpoint(FAMILY), tmp_path / "checkpoint"))


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """In memory, loaded from `folder`."""
    return load_stock(folder)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where experts are spooled to."""
    found = tmp_path / "spool"
    found.mkdir()
    return found


def answer(model: PreTrainedModel) -> Outputs:
    return greedy(model, PROMPTS["short"], new_tokens=2)


def change(model: PreTrainedModel, layer_idx: int, expert_idx: int) -> None:
    """One bit of one weight of an expert."""
    weight = promoe.find_moe_layers(model)[layer_idx].experts.down_proj
    with torch.no_grad():
        weight[expert_idx].view(torch.int32)[0, 0] ^= 1


def offload(model: PreTrainedModel, **arguments: Any) -> None:
    promoe.patch(model, store="disk", **({"cache": 2 * EXPERT_BYTES, "config": config()} | arguments))


def state(model: PreTrainedModel) -> dict[str, Any]:
    """All but where values lie."""
    return {name: found for name, found in snapshot(model).items() if not name.startswith("state ")}


# -- from where ---------------------------------------------------------------------------------------------------


def test_experts_are_read_from_the_checkpoint_that_they_came_from(model: PreTrainedModel, folder: Path) -> None:
    wanted, before = answer(model), state(model)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    experts = [tensor for layer in promoe.find_moe_layers(model) for tensor in layer.parameters()]
    files = open_files()
    offload(model)
    assert model.promoe.stats().store == "FileStore"
    assert {file.path.parent for file in model.promoe._store.files} == {folder}
    assert all(tensor.numel() == 0 for tensor in experts)
    assert [name for name, tensor in model.named_parameters() if is_guard(tensor)] == [
        name for name in values if ".experts." in name
    ]
    answer(model).assert_equals(wanted)
    check_integrity(model)
    assert promoe.unpatch(model) is model
    assert not opened_since(files)
    assert state(model) == before
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    answer(model).assert_equals(wanted)


@pytest.mark.parametrize("expert", [(0, 0), (1, 5), (2, 7)])
def test_one_bit_more_and_they_are_written(
    model: PreTrainedModel, place: Path, expert: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    change(model, *expert)
    wanted = answer(model)
    with caplog.at_level(logging.INFO, logger="promoe.model.offloading"):
        offload(model, config=config(spool_folder=place))
    assert model.promoe.stats().store == "SpooledStore"
    assert f"expert {expert[1]} of MoE layer {expert[0]} differs there" in caplog.text
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    """What it gives is converted as it was when the model was loaded."""
    model = load_stock(folder, dtype=dtype)
    wanted = answer(model)
    offload(model)
    assert model.promoe.stats().store == "FileStore"
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    assert model.dtype == dtype
    answer(model).assert_equals(wanted)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def one_shard_less(folder: Path) -> None:
    shards(folder)[1].unlink()


def cut_off(folder: Path) -> None:
    os.truncate(shards(folder)[0], 5000)


def another_model(folder: Path) -> None:
    shutil.rmtree(folder)
    build("mixtral").save_pretrained(folder)


def a_smaller_model(folder: Path) -> None:
    shutil.rmtree(folder)
    build(FAMILY, hidden=32).save_pretrained(folder)


@pytest.mark.parametrize("harm", [no_folder, one_shard_less, cut_off, another_model, a_smaller_model])
def test_a_checkpoint_that_is_not_there_any_more(
    model: PreTrainedModel, folder: Path, place: Path, harm: Callable[[Path], None]
) -> None:
    wanted = answer(model)
    harm(folder)
    offload(model, config=config(spool_folder=place))
    assert model.promoe.stats().store == "SpooledStore"
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


def test_a_checkpoint_that_cannot_be_read(model: PreTrainedModel, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found while it is compared: the experts are written, from memory."""
    wanted, read, files = answer(model), offloading.read_expert, open_files()

    def failing(store: Any, *args: Any) -> None:
        if not isinstance(store, HostStore):
            raise OSError(5, "Input/output error")
        read(store, *args)

    monkeypatch.setattr(offloading, "read_expert", failing)
    offload(model, config=config(spool_folder=place))
    assert model.promoe.stats().store == "SpooledStore"
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    assert not opened_since(files)


def test_folders_of_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILY)
    for name, found in (
        ("", None),
        (str(folder), folder),
        (str(tmp_path / "gone"), None),
        ("no/such/repository", None),
        ("x" * 5000, None),
    ):
        model.config._name_or_path = name
        assert checkpoint_folder(model) == found
    assert checkpoint_folder(torch.nn.Linear(1, 1)) is None
    # A hub id: what was downloaded, of the revision that was loaded.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot_folder = tmp_path / "hub" / "models--some--model" / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot_folder)
    model.config._name_or_path, model.config._commit_hash = "some/model", "a" * 40
    assert checkpoint_folder(model) == snapshot_folder
    model.config._commit_hash = "b" * 40
    assert checkpoint_folder(model) is None


def test_a_difference_is_found_wherever_it_is() -> None:
    banks = [{"w": torch.arange(24.0).view(4, 6)}, {"w": torch.arange(24.0).view(4, 6)}]
    assert first_difference(HostStore(banks), HostStore(banks)) is None
    for layer_idx in range(2):
        for expert_idx in range(4):
            other = [{"w": bank["w"].clone()} for bank in banks]
            other[layer_idx]["w"][expert_idx, 5] = -0.0 if expert_idx == layer_idx == 0 else 7.5
            found = first_difference(HostStore(banks), HostStore(other))
            assert found == ExpertKey(layer_idx, expert_idx)


def test_numbers_that_are_none_are_compared_as_bits(model: PreTrainedModel) -> None:
    """A NaN is not equal to itself, and -0.0 is equal to 0.0; neither is what decides."""
    zeros, signed = [{"w": torch.zeros(2, 4)}], [{"w": -torch.zeros(2, 4)}]
    assert first_difference(HostStore(zeros), HostStore(signed)) == ExpertKey(0, 0)
    nans = [{"w": torch.full((2, 4), float("nan"))}]
    assert first_difference(HostStore(nans), HostStore([{"w": nans[0]["w"].clone()}])) is None


# -- what is left and what is given back --------------------------------------------------------------------------


def test_what_is_written_has_no_name_and_goes_with_the_model(place: Path) -> None:
    model, files = build(FAMILY), open_files()
    wanted = answer(model)
    offload(model, config=config(spool_folder=place, read_mode="direct"))
    assert list(place.iterdir()) == []
    assert len(opened_since(files)) == len(promoe.find_moe_layers(model))
    answer(model).assert_equals(wanted)
    del model

    def gone() -> bool:
        gc.collect()  # again: a thread may have held the model a moment ago
        return not opened_since(files)

    until(gone)


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
def test_what_is_written_stays_open(
    model: PreTrainedModel, place: Path, read_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is gone, so it could not be opened again, as other files are if too many are open."""
    monkeypatch.setattr(OPEN_FILES, "_limit", 1)
    change(model, 0, 0)
    wanted = answer(model)
    offload(model, config=config(spool_folder=place, read_mode=read_mode))
    assert model.promoe.stats().store == "SpooledStore"
    assert not list(place.iterdir())
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


def test_nobody_else_keeps_the_weights(model: PreTrainedModel) -> None:
    """Whoever holds a parameter holds an empty one; it has its values again when the model is unpatched."""
    held = promoe.find_moe_layers(model)[0].experts.gate_up_proj
    values, storage = held.detach().clone(), weakref.ref(held.untyped_storage())
    offload(model)
    gc.collect()
    assert storage() is None
    assert held.numel() == 0
    promoe.unpatch(model)
    assert torch.equal(held, values)
    assert promoe.find_moe_layers(model)[0].experts.gate_up_proj is held


def test_a_model_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = build(FAMILY)
        wanted = answer(model)
        offload(model)
        answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


def test_again_and_again_and_trained_in_between(model: PreTrainedModel, place: Path) -> None:
    for predictor in ("gate", None, "random"):
        wanted = answer(model)
        offload(model, predictor=predictor, config=config(spool_folder=place))
        answer(model).assert_equals(wanted)
        with pytest.raises(PatchStateError, match="patched already"):
            offload(model)
        promoe.unpatch(model)
        model(**PROMPTS["short"]).logits.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None


def test_gradients_and_gaps_between_rows(model: PreTrainedModel, place: Path) -> None:
    """What was trained may still have its gradients, and a stack may be a part of a larger tensor."""
    experts = promoe.find_moe_layers(model)[1].experts
    larger = torch.zeros(2 * 8, *experts.down_proj.shape[1:])
    experts.down_proj.data = larger[::2].copy_(experts.down_proj.data)
    model(**PROMPTS["short"]).logits.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    wanted = answer(model)
    offload(model, config=config(spool_folder=place))
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in model.named_parameters())


def in_place(experts: Any) -> None:
    with torch.no_grad():
        experts.down_proj.mul_(2)


def other_values(experts: Any) -> None:
    experts.down_proj.data = experts.down_proj.data * 2


def another(experts: Any) -> None:
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 2)


@pytest.mark.parametrize("change_it", [in_place, other_values, another])
def test_experts_that_change_while_they_are_compared(
    model: PreTrainedModel, change_it: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is what was compared served, nor is the change lost."""
    compare, files = offloading.first_difference, open_files()

    def changed_meanwhile(*stores: Any) -> Any:
        found = compare(*stores)
        change_it(promoe.find_moe_layers(model)[1].experts)
        return found

    monkeypatch.setattr(offloading, "first_difference", changed_meanwhile)
    experts = promoe.find_moe_layers(model)[1].experts
    wanted = experts.down_proj.detach() * 2
    with pytest.raises(PatchStateError, match=r"layers\.1\.mlp\.experts\.down_proj was changed while"):
        offload(model)
    assert torch.equal(experts.down_proj, wanted)
    assert not any(map(is_guard, model.parameters()))
    assert not opened_since(files)


def test_a_parameter_that_another_module_has_too(model: PreTrainedModel) -> None:
    model.extra = torch.nn.Module()
    model.extra.w = promoe.find_moe_layers(model)[0].experts.down_proj
    with (
        leaving_untouched(model),
        pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.experts\.down_proj is also extra\.w"),
    ):
        offload(model)


def test_what_was_put_there_meanwhile_stays(model: PreTrainedModel) -> None:
    experts = promoe.find_moe_layers(model)[0].experts
    offload(model)
    mine = experts.down_proj = torch.nn.Parameter(torch.ones(8, 64, 32))
    promoe.unpatch(model)
    assert experts.down_proj is mine
    assert not is_guard(experts.gate_up_proj)


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_to_be_trained_is_decided_meanwhile(model: PreTrainedModel, trained: bool) -> None:
    count = len([parameter for parameter in model.parameters() if parameter.requires_grad])
    offload(model)
    assert len([parameter for parameter in model.parameters() if parameter.requires_grad]) == count
    model.requires_grad_(trained)
    promoe.unpatch(model)
    assert {parameter.requires_grad for parameter in model.parameters()} == {trained}


def test_patched_in_inference_mode_and_trained_afterwards(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        offload(model)
    promoe.unpatch(model)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(**PROMPTS["short"]).logits.sum().backward()


def test_saving_is_refused_and_possible_afterwards(model: PreTrainedModel, tmp_path: Path) -> None:
    wanted = answer(model)
    offload(model)
    with pytest.raises(PatchStateError, match=r"experts are in files.*promoe\.unpatch\(model\)"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(PromoeError, match="are in files"):
        promoe.find_moe_layers(model)[0].experts.down_proj.sum()
    promoe.unpatch(model)
    model.save_pretrained(tmp_path / "saved")
    answer(load_stock(tmp_path / "saved")).assert_equals(wanted)


def test_a_checkpoint_that_changes_while_it_serves(model: PreTrainedModel, folder: Path) -> None:
    """Nothing else is ever read; unpatching says so and leaves the model patched, until the file is as it was."""
    wanted = answer(model)
    offload(model, config=config(read_mode="page_cache"))
    store = model.promoe._store
    shard = store.files[store.chunks(ExpertKey(0, 0))[0].source_idx].path
    kept, modified_ns = shard.read_bytes(), shard.stat().st_mtime_ns
    with shard.open("r+b") as file:
        file.write(bytes(len(kept)))
    with pytest.raises(CheckpointError, match=r"could not be read: .*changed"):
        promoe.unpatch(model)
    assert is_guard(promoe.find_moe_layers(model)[0].experts.down_proj)
    with shard.open("r+b") as file:
        file.write(kept)
    os.utime(shard, ns=(modified_ns, modified_ns))
    answer(model).assert_equals(wanted)
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


def test_a_cache_of_everything_leaves_the_model_as_it_is(model: PreTrainedModel) -> None:
    with leaving_untouched(model):
        with pytest.warns(UserWarning, match="has slots for all experts, so they stay in RAM"):
            promoe.patch(model, store="disk", cache="100%")
        assert not any(attach.is_patched(module) for module in model.modules())
        assert not any(map(is_guard, model.parameters()))
        promoe.unpatch(model)


@pytest.mark.parametrize(("own_bytes", "slots"), [(2**40, 12), (0, 6), (None, 6)])
def test_ram_that_will_be_free_is_slots_to_be(
    model: PreTrainedModel, own_bytes: int | None, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the experts take any: a checkpoint that is mapped is counted as free already."""
    experts_bytes = 24 * EXPERT_BYTES
    free = {
        6: sizes.AUTO_RESERVE_BYTES + 6 * EXPERT_BYTES,
        12: sizes.AUTO_RESERVE_BYTES + 12 * EXPERT_BYTES - experts_bytes,
    }
    monkeypatch.setattr(finding, "own_ram_bytes", lambda: own_bytes)
    monkeypatch.setattr(slot_plan, "free_bytes", lambda *args: free[slots])
    offload(model, cache="auto")
    assert model.promoe.stats().cache_slots == slots
    promoe.unpatch(model)


def test_slots_on_a_device(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "open_device", lambda name: FakeDevice())
    wanted = answer(model)
    promoe.patch(model, store="disk", device="cuda", cache="30%", config=config())
    answer(model).assert_equals(wanted)
    assert "FileStore" in model.promoe.stats().store
    promoe.unpatch(model)
    answer(model).assert_equals(wanted)


# -- where it cannot be done --------------------------------------------------------------------------------------


@pytest.fixture(params=["checkpoint", "spool"])
def either(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A model that is served from its checkpoint, and one whose experts are written."""
    if request.param == "spool":
        change(model, 1, 1)
    return model


@pytest.mark.parametrize("point", ["attach.attach", "SlotPool", "FileLink", "Engine", "refuse_changes"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_model_and_the_disk_as_they_were(
    either: PreTrainedModel, place: Path, point: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise error("injected")

    with leaving_untouched(either):
        with monkeypatch.context() as patching:
            if point == "attach.attach":
                patching.setattr(attach, "attach", failing)
            else:
                patching.setattr(assembly, point, failing)
            with pytest.raises(error, match="injected"):
                offload(either, config=config(spool_folder=place))
        assert list(place.iterdir()) == []
        answer(either)


@pytest.mark.parametrize("moment", ["patched", "giving back", "given back"])
def test_interrupted_when_all_was_done(
    either: PreTrainedModel, place: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes after the model was patched: then everything is undone, too."""
    wanted, files, hold, held = answer(either), open_files(), offloading._ExpertParameter.hold, []

    def attached(*args: Any, **kwargs: Any) -> None:
        assembly.assemble(*args, **kwargs)
        if moment == "patched":
            raise KeyboardInterrupt

    def interrupted(expert: Any, values: torch.Tensor) -> None:
        hold(expert, values)
        held.append(expert)
        if len(held) == {"patched": 0, "giving back": 3, "given back": 6}[moment]:
            raise KeyboardInterrupt

    with leaving_untouched(either):
        with monkeypatch.context() as patching_:
            patching_.setattr(serving, "assemble", attached)
            patching_.setattr(offloading._ExpertParameter, "hold", interrupted)
            with pytest.raises(KeyboardInterrupt):
                offload(either, config=config(spool_folder=place))
        assert list(place.iterdir()) == []
        assert not opened_since(files)
        answer(either).assert_equals(wanted)


def test_a_file_that_is_replaced_meanwhile(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*args: Any, **kwargs: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(assembly, "FileLink", stale)
    with leaving_untouched(model), pytest.raises(CheckpointError, match=r"Stale file handle\. Nothing was changed"):
        offload(model)


def test_a_forward_that_began_meanwhile(either: PreTrainedModel, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While experts are compared and written nothing is changed, so that one may; then it is waited for by the user."""
    asked = []

    def begun(model: Any, layers: Any) -> None:
        asked.append(list(place.iterdir()))
        if len(asked) == 2:
            raise PatchStateError("1 forward of it is running")

    monkeypatch.setattr(finding, "check_idle", begun)
    monkeypatch.setattr(offloading, "check_idle", begun)
    with leaving_untouched(either), pytest.raises(PatchStateError, match="is running"):
        offload(either, config=config(spool_folder=place))
    assert asked[0] == []
    assert list(place.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, place: Path) -> None:
    model = build(FAMILY)
    missing = tmp_path / "missing"
    match = rf"experts \(576\.0 KiB\) could not be written to '{re.escape(str(missing))}': No such file.*spool_folder"
    with leaving_untouched(model):
        for parent in (missing, str(missing)):
            with pytest.raises(ConfigError, match=match):
                offload(model, config=config(spool_folder=parent))
        with pytest.raises(ConfigError, match=r"'spool_folder' field of PromoeConfig must be None or a folder\. Got 7"):
            config(spool_folder=7)
