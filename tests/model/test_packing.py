"""Packed experts, and models that read them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from needs import needs_packing
from quantised_checkpoints import write_fp8
from tiny_checkpoint import write_checkpoint
from tiny_models import build, token_ids
from transformers import AutoModelForCausalLM

import promoe
from promoe import cli
from promoe.commands.pack import options as pack
from promoe.commands.pack.command import run_pack
from promoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from promoe.experts.kernels import packed, proofs
from promoe.experts.kernels.formats import FORMATS, formats_of
from promoe.experts.kernels.packed import PackedMatrix, Packing
from promoe.model import packing, slot_folders
from promoe.model.opening import open_headers
from promoe.model.slot_index import INDEX
from promoe.runtime.resident import ResidentHandle
from promoe.stores.slot_files import SlotFilesStore

pytestmark = needs_packing

FOLDER = "promoe-packed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed."""
    folder = write_checkpoint(tmp_path_factory.mktemp("packed") / "model", chat=False, hidden=128, intermediate=64)
    out = io.StringIO()
    run_pack(pack.Options(str(folder)), out)
    packed_words, gains = out.getvalue().splitlines()
    assert re.fullmatch(r".* of experts written into .*promoe-packed in .*\. It is used from now on\.", packed_words)
    assert re.fullmatch(r".* as fast now \(measured\): down_proj \d\.\d\d, gate_up_proj \d\.\d\d\.", gains)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """One to damage, with the same times."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def store_of(model: Any) -> Any:
    return model.promoe.runtime.engine.store


def stock(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("cache", ["20%", "60%", "100%"])
@pytest.mark.parametrize("predictor", ["gate", "random", None])
def test_output_is_the_unmodified_models(checkpoint: Path, cache: str, predictor: str | None) -> None:
    expected, model = stock(checkpoint), promoe.from_pretrained(checkpoint, cache=cache, predictor=predictor)
    assert isinstance(store_of(model), SlotFilesStore)
    tensors = model.promoe._pools[0].tensors(0)
    assert all(isinstance(tensors[name], PackedMatrix) for name in ("gate_up_proj", "down_proj"))
    with torch.no_grad():
        for tokens in (1, 9, 64, 200):
            ids = token_ids(1, tokens, seed=tokens)
            assert torch.equal(model(ids).logits, expected(ids).logits)
        ids = token_ids(2, 7)
        found = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(found, expected.generate(ids, max_new_tokens=12, do_sample=False))
    promoe.unpatch(model)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_a_model_that_was_in_memory(checkpoint: Path) -> None:
    """Only what was compared with the model is read."""
    model = stock(checkpoint)
    promoe.patch(model, store="disk", cache="60%")
    assert not isinstance(store_of(model), SlotFilesStore)
    model.promoe.close()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_families(family: str, tmp_path: Path) -> None:
    build(family, dtype=torch.bfloat16, hidden=64, intermediate=64).save_pretrained(tmp_path)
    run_pack(pack.Options(str(tmp_path)), io.StringIO())
    expected, model = stock(tmp_path), promoe.from_pretrained(tmp_path, cache="60%")
    assert isinstance(store_of(model), SlotFilesStore)
    with torch.no_grad():
        for tokens in (1, 20, 90):
            ids = token_ids(1, tokens)
            assert torch.equal(model(ids).logits, expected(ids).logits)
    model.promoe.close()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_another_implementation_later_reads_copies(checkpoint: Path, implementation: str) -> None:
    expected, model = stock(checkpoint), promoe.from_pretrained(checkpoint, cache="60%")
    for one in (expected, model):
        one.set_experts_implementation(implementation)
    with torch.no_grad():
        for tokens in (1, 40):
            ids = token_ids(1, tokens)
            assert torch.equal(model(ids).logits, expected(ids).logits)
    model.promoe.close()


def test_where_bits_differ_output_does_not(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_another_order(packed: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        return (x.flip(1).float() @ packed.dense().flip(1).float().t()).to(x.dtype) + 1

    expected, model = stock(checkpoint), promoe.from_pretrained(checkpoint, cache="60%")
    monkeypatch.setattr(packed, "_PRODUCTS", defaultdict(packed._Products))
    monkeypatch.setattr(proofs, "_OF_FORMATS", {})
    monkeypatch.setattr(PackedMatrix, "multiply_packed", in_another_order)
    with torch.no_grad():
        ids = token_ids(1, 30)
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert {proof.same for proof in proofs._OF_FORMATS.values()} - {None} == {False}
    model.promoe.close()


def test_only_what_is_quicker_packed_is_packed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quicker = {"gate_up_proj": 1.05, "down_proj": 1.04}
    (possible,) = formats_of(open_headers(copied).layers, FORMATS["packed"]).values()
    gains = {packing: quicker[name] for name, packing in possible.items()}
    monkeypatch.setattr(packing, "LEAST_GAIN", 1.05)
    monkeypatch.setattr(packing, "gain_of", gains.__getitem__)
    out = io.StringIO()
    run_pack(pack.Options(str(copied)), out)
    assert (
        "Left as in the checkpoint, because packing them would gain nothing or change bits: down_proj.\n"
        in out.getvalue()
    )
    monkeypatch.undo()  # what was packed is read wherever it can be
    expected, model = stock(copied), promoe.from_pretrained(copied, cache="60%")
    assert isinstance(store_of(model), SlotFilesStore)
    tensors = model.promoe._pools[0].tensors(0)
    assert isinstance(tensors["gate_up_proj"], PackedMatrix)
    assert isinstance(tensors["down_proj"], torch.Tensor)
    with torch.no_grad():
        for tokens in (1, 9, 64):
            ids = token_ids(1, tokens, seed=tokens)
            assert torch.equal(model(ids).logits, expected(ids).logits)
    model.promoe.close()


def test_what_is_not_quicker_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST_GAIN", 1.05)
    monkeypatch.setattr(packing, "gain_of", lambda packing: 1.04)
    shutil.rmtree(copied / FOLDER)
    message = (
        r"gains nothing .* Measured speedup .*: down_proj 1\.04, gate_up_proj 1\.04; packing is worth it from 1\.05"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        run_pack(pack.Options(str(copied)), io.StringIO())
    assert not (copied / FOLDER).exists()


def test_what_was_packed_before_and_would_not_be_now_is_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST_GAIN", 1e9)
    with pytest.raises(
        UnsupportedModelError, match=r"packed into .*promoe-packed before are still used: delete that folder\."
    ):
        run_pack(pack.Options(str(copied)), io.StringIO())
    assert (copied / FOLDER / INDEX).is_file()


@pytest.mark.parametrize("choice", ["none", "FOLDER"])
def test_a_folder_without_packed_experts_is_said(choice: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = str(tmp_path) if choice == "FOLDER" else choice
    with pytest.raises(
        ConfigError, match=rf"experts='{folder}' was asked for, but it is not a folder with an experts\.json"
    ):
        promoe.from_pretrained(checkpoint, cache="60%", experts=folder)


def test_the_number_of_threads_may_change_while_a_model_is_open(copied: Path) -> None:
    expected, model = stock(copied), promoe.from_pretrained(copied, cache="60%")
    assert isinstance(store_of(model), SlotFilesStore)
    with torch.no_grad():
        for threads in (2, 4, 1):
            torch.set_num_threads(threads)
            for tokens in (1, 9, 64):
                ids = token_ids(1, tokens, seed=tokens)
                assert torch.equal(model(ids).logits, expected(ids).logits)
    model.promoe.close()


def test_what_one_row_has_other_bits_for_is_not_packed(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "_PRODUCTS", defaultdict(packed._Products))
    monkeypatch.setattr(proofs, "_OF_FORMATS", {})
    monkeypatch.setattr(packed, "_compare", lambda packing, num_rows: num_rows != 1)
    model = promoe.from_pretrained(copied, cache="60%")
    assert not isinstance(store_of(model), SlotFilesStore)
    assert "of another processor, number of threads, version of torch" in caplog.text
    model.promoe.close()
    with pytest.raises(UnsupportedModelError, match="one token's row with the same bits"):
        run_pack(pack.Options(str(copied)), io.StringIO())


def test_checkpoint_reads_the_checkpoint(checkpoint: Path) -> None:
    model = promoe.from_pretrained(checkpoint, cache="60%", experts="checkpoint")
    assert not isinstance(store_of(model), SlotFilesStore)
    model.promoe.close()
    assert isinstance(promoe.from_pretrained(checkpoint, cache="100%", experts="checkpoint").promoe, ResidentHandle)


def test_a_folder_of_ones_own(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pack", str(checkpoint), "--out", str(tmp_path / "mine")]) == 0
    assert f"Open the model with experts='{tmp_path / 'mine'}' (--experts of promoe run)." in capsys.readouterr().out
    model = promoe.from_pretrained(checkpoint, cache="60%", experts=tmp_path / "mine")
    assert {file.path.parent for file in store_of(model).files} == {tmp_path / "mine"}
    model.promoe.close()


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(0, 12345))


def rewrite(folder: Path) -> None:
    """Other weights of the same names and sizes."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def test_a_checkpoint_that_was_only_dated_anew_or_copied_keeps_its_packed_experts(copied: Path, tmp_path: Path) -> None:
    touch(copied)
    shutil.copytree(copied, tmp_path / "a copy", copy_function=shutil.copyfile)
    for folder in (copied, tmp_path / "a copy"):
        model = promoe.from_pretrained(folder, cache="60%")
        assert isinstance(store_of(model), SlotFilesStore)
        model.promoe.close()


def another_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / FOLDER / INDEX).read_text())
    (folder / FOLDER / INDEX).write_text(json.dumps(index | changes))


def shorten(folder: Path) -> None:
    path = folder / FOLDER / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def another_tensor(folder: Path) -> None:
    path = folder / FOLDER / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"slots"', b'"slits"', 1))


def of_another_checkpoint(folder: Path) -> None:
    """As two that pack into one folder at once would leave it: whole files, of the right shapes."""
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    rewrite(other)
    run_pack(pack.Options(str(other)), io.StringIO())
    name = "layer-00001.safetensors"
    shutil.copy(other / FOLDER / name, folder / FOLDER / name)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (rewrite, "other files, or the checkpoint was written since"),
        (lambda folder: another_index(folder, format=99), "not in format 3"),
        (lambda folder: another_index(folder, matrices=[]), "another model, or another dtype"),
        (lambda folder: another_index(folder, layers=None), "another model"),
        (lambda folder: (folder / FOLDER / INDEX).write_text("[1"), "Expecting"),
        (lambda folder: (folder / FOLDER / INDEX).write_text("[]"), "not in format 3"),
        (lambda folder: (folder / FOLDER / "layer-00002.safetensors").unlink(), "layer-00002.safetensors"),
        (shorten, "truncated"),
        (another_tensor, "layer-00001.safetensors does not belong to the experts that experts.json describes"),
        (of_another_checkpoint, "layer-00001.safetensors does not belong to the experts that experts.json describes"),
    ],
)
def test_what_does_not_fit_is_not_used(copied: Path, damage: Any, what: str, caplog: pytest.LogCaptureFixture) -> None:
    damage(copied)
    model = promoe.from_pretrained(copied, cache="60%")
    assert not isinstance(store_of(model), SlotFilesStore)
    assert what in caplog.text
    assert "Write them again (promoe pack, promoe quantize)" in caplog.text
    ids = token_ids(1, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(copied)(ids).logits)
    model.promoe.close()
    with pytest.raises(ConfigError, match=re.escape(what)):
        promoe.from_pretrained(copied, cache="60%", experts=copied / FOLDER)


def test_another_layout_is_not_used(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "signature", "that of another machine")
    with pytest.raises(ConfigError, match="another processor"):
        promoe.from_pretrained(copied, cache="60%", experts=copied / FOLDER)


def test_another_dtype_is_not_used(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="of another processor, number of threads, version of torch, model, dtype"):
        promoe.from_pretrained(checkpoint, cache="60%", experts=checkpoint / FOLDER, dtype=torch.float32)


def test_what_is_replaced_under_a_model_is_not_served(copied: Path) -> None:
    model = promoe.from_pretrained(copied, cache="30%")
    run_pack(pack.Options(str(copied)), io.StringIO())  # a new set of files: the model keeps the ones it has
    ids = token_ids(1, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(copied)(ids).logits)
    model.promoe.close()


def test_nothing_to_pack(tmp_path: Path) -> None:
    build("qwen3_moe", dtype=torch.float32).save_pretrained(tmp_path)
    found = r"Found gate_up_proj \d+ x \d+ in float32, down_proj \d+ x \d+ in float32; grouped_mm; torch with "
    with pytest.raises(UnsupportedModelError, match=found):
        run_pack(pack.Options(str(tmp_path)), io.StringIO())
    assert not (tmp_path / FOLDER).exists()


def test_experts_in_fewer_bits_are_not_packed(tmp_path: Path) -> None:
    write_fp8(tmp_path, hidden=64, intermediate=64)
    with pytest.raises(
        UnsupportedModelError, match=r"take .* each in the checkpoint \(in fewer bits\), and would take .* packed"
    ):
        run_pack(pack.Options(str(tmp_path)), io.StringIO())
    assert not (tmp_path / FOLDER).exists()


def test_too_little_room(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_folders.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(ConfigError, match=r"The experts take .* MiB, but .* has only 1.0 MiB free"):
        run_pack(pack.Options(str(checkpoint), out=str(tmp_path / "out")), io.StringIO())


def test_too_little_room_leaves_what_is_packed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_folders.shutil, "disk_usage", lambda folder: SimpleNamespace(free=-(2**30)))
    with pytest.raises(ConfigError, match="The experts take"):
        run_pack(pack.Options(str(copied)), io.StringIO())
    monkeypatch.undo()
    model = promoe.from_pretrained(copied, cache="60%", experts=copied / FOLDER)
    assert isinstance(store_of(model), SlotFilesStore)
    model.promoe.close()


def test_a_folder_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Choose another folder with --out"):
        run_pack(pack.Options(str(checkpoint), out=str(tmp_path / "file" / "out")), io.StringIO())


def test_what_was_interrupted_is_not_used_and_goes_on(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends packing again takes back what was packed before: its files may be half of each."""
    opened = open_headers(copied)
    real, read = slot_folders.read_expert, []

    def fail(store: Any, key: Any, slot: memoryview) -> None:
        if key.layer_idx == 1 and not read:
            raise OSError(5, "injected")
        real(store, key, slot)

    monkeypatch.setattr(slot_folders, "read_expert", fail)
    with pytest.raises(CheckpointError, match=r"Expert 0 of MoE layer 1 could not be read: .*injected.* goes on from"):
        packing.write_packed(opened.layers, opened.store, copied / FOLDER)
    assert {path.name for path in (copied / FOLDER).iterdir()} == {"layer-00000.safetensors", f"{INDEX}.part"}
    model = promoe.from_pretrained(copied, cache="60%")
    assert not isinstance(store_of(model), SlotFilesStore)
    model.promoe.close()

    def count(store: Any, key: Any, slot: memoryview) -> None:
        read.append(key.layer_idx)
        real(store, key, slot)

    monkeypatch.setattr(slot_folders, "read_expert", count)
    packing.write_packed(opened.layers, opened.store, copied / FOLDER)
    assert set(read) == {1, 2}
    opened.store.close()
    expected, model = stock(copied), promoe.from_pretrained(copied, cache="60%", experts="packed")
    ids = token_ids(1, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    model.promoe.close()
