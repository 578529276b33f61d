"""The weights of a patched model, as those who save or list them see them."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import promoe
from life.models import FAMILIES, ask, assert_unharmed, build, loaded, opened, parts_with_experts, patched
from promoe.errors import PatchStateError, PromoeError
from promoe.experts.guard import is_guard
from promoe.runtime.resident import ResidentHandle

NOT_SAVED = r"cannot be saved.*experts are in files.*Nothing was written.*promoe\.unpatch\(model\)"


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_is_the_models_own(family: str) -> None:
    """Names, order, shapes, dtypes and values, of the whole and of its parts, also in the midst of its use."""
    model = build(family, dtype=torch.bfloat16)
    ask(model)  # some gates cast themselves when they are first used
    parts = parts_with_experts(model)
    before = [{name: tensor.clone() for name, tensor in part.state_dict().items()} for part in parts]
    metadata = [part.state_dict()._metadata for part in parts]  # type: ignore[attr-defined]
    with patched(model):
        ask(model)
        for part, kept, versions in zip(parts, before, metadata, strict=True):
            found = part.state_dict()
            assert list(found) == list(kept)
            assert found._metadata == versions  # type: ignore[attr-defined]
            for name, tensor in kept.items():
                assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_while_patched_is_what_would_be_saved_unpatched(family: str, tmp_path: Path) -> None:
    """The same files, byte by byte, from which Transformers loads a model that answers the same."""
    model = build(family)
    expected = ask(model)
    model.save_pretrained(tmp_path / "before", max_shard_size="100KB")
    with patched(model):
        ask(model)
        model.save_pretrained(tmp_path / "patched", max_shard_size="100KB")
    assert files(tmp_path / "patched") == files(tmp_path / "before")
    assert_unharmed(loaded(family, tmp_path / "patched"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_files_are_not_saved(family: str, tmp_path: Path) -> None:
    """Whoever tries is told what to do, before a folder is made or a file begun; and can do it."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("old")
    with opened(family) as model:
        expected = ask(model)
        whole_models = [part for part in parts_with_experts(model) if hasattr(part, "save_pretrained")]
        assert model in whole_models
        for part in whole_models:
            for folder in (tmp_path / "new", kept):
                with pytest.raises(PatchStateError, match=NOT_SAVED):
                    part.save_pretrained(folder)
        with pytest.raises(PatchStateError, match=NOT_SAVED):
            model.push_to_hub("nobody/nothing")
        with pytest.raises(PatchStateError, match=NOT_SAVED):
            torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        assert files(kept) == {"config.json": b"old"}
        assert_unharmed(model, expected)
        promoe.unpatch(model)
        model.save_pretrained(tmp_path / "unpatched")
        assert_unharmed(model, expected)
    assert_unharmed(loaded(family, tmp_path / "unpatched"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_dict_of_parts_with_experts_in_files(family: str) -> None:
    """Those without experts have one."""
    with opened(family) as model:
        for part in parts_with_experts(model):
            with pytest.raises(PromoeError, match="experts are in files"):
                part.state_dict()
        gate = promoe.find_moe_layers(model)[0].gate
        assert list(gate.state_dict()) == [name for name, _ in gate.named_parameters()]


def test_values_that_are_not_there_cannot_be_had_by_another_way(tmp_path: Path) -> None:
    """Names and shapes may be listed, as who loads an adapter does; the values behind them are refused by name."""
    with opened("qwen2_moe") as model:
        for listed in (model.state_dict(keep_vars=True), torch.nn.Sequential(model).state_dict()):
            assert [tensor.shape for tensor in listed.values()] == [parameter.shape for parameter in model.parameters()]
            absent = {name: tensor for name, tensor in listed.items() if is_guard(tensor)}
            assert len(absent) == 6
            some = next(iter(absent.values()))
            uses: list[Any] = [some.cpu, some.clone, some.numpy, some.tolist, partial(torch.save, some, io.BytesIO())]
            for use in [*uses, partial(save_file, absent, tmp_path / "weights.safetensors")]:
                with pytest.raises(PromoeError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.* in files"):
                    use()
        assert not list(tmp_path.iterdir())


def test_a_state_dict_from_elsewhere_is_saved(tmp_path: Path) -> None:
    """Experts in files are no reason not to write what is given."""
    expected = ask(build("qwen2_moe"))
    with opened("qwen2_moe") as model:
        model.save_pretrained(tmp_path, state_dict=build("qwen2_moe").state_dict())
    assert_unharmed(loaded("qwen2_moe", tmp_path), expected)


def test_experts_that_were_all_loaded_are_saved(tmp_path: Path) -> None:
    """A cache of everything leaves nothing in the files."""
    with opened("qwen2_moe", cache="100%", config=promoe.PromoeConfig(), link="auto") as model:
        assert isinstance(model.promoe, ResidentHandle)
        expected = ask(model)
        model.save_pretrained(tmp_path)
        promoe.unpatch(model)
    assert_unharmed(loaded("qwen2_moe", tmp_path), expected)
