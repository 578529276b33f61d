"""Folders in which some experts of each layer have more bits: what is written, and what is tied to what."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from safetensors.torch import load_file
from tiny_checkpoint import write_checkpoint

import promoe
from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.moe_layers import find_moe_layers
from promoe.model import slot_folders
from promoe.model.opening import open_headers
from promoe.model.quantizing import Hot, Quantization, write_quantized
from promoe.model.slot_index import INDEX
from promoe.scheduler import ExpertKey
from promoe.stores.layout import PAGE_BYTES
from promoe.stores.slot_files import HOT_SLOTS, SLOTS

HOT = frozenset(ExpertKey(layer, expert) for layer in range(3) for expert in (1, 4 + layer))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", chat=False, hidden=128, intermediate=64)


def quantise(
    folder: Path, out: Path, method: str = "rtn", experts: frozenset[ExpertKey] = HOT, bits: int = 4, hot_bits: int = 8
) -> Quantization:
    opened = open_headers(folder)
    try:
        hot_format = FORMATS["int8"] if hot_bits == 8 else Int4Format(hot_bits, 32)
        hot = Hot(experts, hot_format) if experts else None
        return write_quantized(opened.layers, opened.store, out, Int4Format(bits, 32), method, hot=hot)
    finally:
        opened.store.close()


@pytest.mark.parametrize(("bits", "hot_bits", "method"), [(4, 8, "rtn"), (2, 4, "hqq"), (3, 8, "hqq")])
def test_files_hold_each_expert_in_its_own_format(
    bits: int, hot_bits: int, method: str, folder: Path, tmp_path: Path
) -> None:
    """8 bits have one method only."""
    done = quantise(folder, tmp_path / "out", method, bits=bits, hot_bits=hot_bits)
    model = promoe.from_pretrained(folder, cache="100%", experts="checkpoint")
    served = promoe.from_pretrained(folder, cache="50%", experts=tmp_path / "out")
    store = served.promoe.runtime.engine.store
    assert store.hot is not None
    assert store.hot.experts == HOT
    nbytes = 0
    for layer in find_moe_layers(model):
        tensors = load_file(tmp_path / "out" / f"layer-{layer.layer_idx:05}.safetensors")
        assert [len(tensors[name]) for name in (SLOTS, HOT_SLOTS)] == [6, 2]
        nbytes += sum(tensor.numel() for tensor in tensors.values())
        own = layer.rows()
        rows = {SLOTS: iter(tensors[SLOTS]), HOT_SLOTS: iter(tensors[HOT_SLOTS])}
        for expert in range(layer.num_experts):
            is_hot = ExpertKey(layer.layer_idx, expert) in HOT
            row = next(rows[HOT_SLOTS if is_hot else SLOTS])
            for spec in (store.hot if is_hot else store).layouts[layer.layer_idx].tensors:
                assert spec.format is not None
                assert spec.format.name == f"int{hot_bits if is_hot else bits}"
                written = row[spec.offset_bytes : spec.end_bytes]
                assert torch.equal(written, spec.format.quantize(own[spec.name][expert], method))
    assert done.nbytes == nbytes == sum(plan.nbytes for plan in _all_slots(served))
    assert done.plain == []
    served.promoe.close()


def _all_slots(model: Any) -> Any:
    model.promoe.resize("100%")
    return model.promoe._pools


def test_the_error_is_between_those_of_the_two_forms(folder: Path, tmp_path: Path) -> None:
    low, mixed = (quantise(folder, tmp_path / f"out{len(hot)}", experts=hot).errors for hot in (frozenset(), HOT))
    assert low.keys() == mixed.keys()
    for name, error in mixed.items():
        # A quarter of the experts has nearly none.
        assert 0.8 * low[name] < error < 0.95 * low[name]


def test_slots_of_whole_pages_begin_at_pages(tmp_path: Path) -> None:
    """In 8 bits, these experts have tensors of more than 64 KiB, in 4 bits they have not."""
    folder = write_checkpoint(tmp_path / "model", chat=False, hidden=320, intermediate=128)
    quantise(folder, tmp_path / "out")
    served = promoe.from_pretrained(folder, cache="50%", experts=tmp_path / "out")
    store = served.promoe.runtime.engine.store
    sizes = [layouts[0].slot_bytes % PAGE_BYTES == 0 for layouts in (store.layouts, store.hot.layouts)]
    assert sizes == [False, True]
    assert all(chunk.source_offset_bytes % PAGE_BYTES == 0 for key in HOT for chunk in store.chunks(key)[:1])
    served.promoe.close()


def test_it_is_found_by_name(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"promoe-int4-hot8 has no .*`promoe quantize MODEL --bits 4 --hot 8 --counts"
    ):
        promoe.from_pretrained(folder, experts="int4-hot8")
    quantise(folder, folder / "promoe-int4-hot8")
    model = promoe.from_pretrained(folder, experts="int4-hot8", cache="50%")
    assert [pool.num_slots for pool in model.promoe._pools] == [9, 3]
    model.promoe.close()


def test_it_goes_on_after_an_interruption(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantise(folder, whole)
    real, read = slot_folders.read_expert, []

    def interrupted(store: Any, key: Any, slot: memoryview) -> None:
        if len(read) == 13:
            raise KeyboardInterrupt
        read.append(key)
        real(store, key, slot)

    monkeypatch.setattr(slot_folders, "read_expert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(folder, out)
    assert {path.name for path in out.iterdir()} == {"layer-00000.safetensors", f"{INDEX}.part"}
    monkeypatch.setattr(slot_folders, "read_expert", lambda *args: (read.append(args[1]), real(*args))[1])
    del read[:]
    quantise(folder, out)
    assert {key.layer_idx for key in read} == {1, 2}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


@pytest.mark.parametrize("change", ["experts", "bits", "none"])
def test_what_was_begun_otherwise_is_not_kept(
    change: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    quantise(folder, out)
    (out / INDEX).rename(out / f"{INDEX}.part")  # as if it had been interrupted at the very end
    read = []
    real = slot_folders.read_expert
    monkeypatch.setattr(slot_folders, "read_expert", lambda *args: (read.append(args[1]), real(*args))[1])
    others = frozenset(ExpertKey(key.layer_idx, key.expert_idx - 1) for key in HOT)
    changes: dict[str, Any] = {"experts": {"experts": others}, "bits": {"bits": 3}, "none": {"experts": frozenset()}}
    quantise(folder, out, **changes[change])
    assert {key.layer_idx for key in read} == {0, 1, 2}
    model = promoe.from_pretrained(folder, cache="50%", experts=out)
    model.promoe.close()


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        ({"experts": [[1, 4], [1, 5], [2, 6]]}, "does not belong to the experts"),
        ({"experts": [[1, 4], [1, 5]]}, "of another model"),
        ({"experts": [[1, 4], [1, 5], [8]]}, "names hot experts that a layer of 8 cannot have"),
        ({"experts": [[4, 1], [1, 5], [1, 6]]}, "names hot experts"),
        ({"experts": [[1, 4], [1, 5], []]}, "names hot experts"),
        ({"experts": [list(range(8)), [1, 5], [1, 6]]}, "names hot experts"),
        ({"experts": [[1, 4], [1, 5], {"1": 1}]}, "names hot experts"),
        ({"matrices": []}, "of another model"),
        ([], "of another model"),
    ],
)
def test_a_changed_index_is_noticed(hot: Any, message: str, folder: Path, tmp_path: Path) -> None:
    quantise(folder, tmp_path / "out")
    path = tmp_path / "out" / INDEX
    index = json.loads(path.read_text())
    assert index["hot"]["experts"] == [[1, 4], [1, 5], [1, 6]]
    index["hot"] = {**index["hot"], **hot} if isinstance(hot, dict) else hot
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        promoe.from_pretrained(folder, experts=tmp_path / "out")


def test_an_index_without_its_hot_experts_is_noticed(folder: Path, tmp_path: Path) -> None:
    quantise(folder, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    del index["hot"]
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="does not belong to the experts"):
        promoe.from_pretrained(folder, experts=tmp_path / "out")


def test_it_is_for_slots_in_ram(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise(folder, tmp_path / "out")
    monkeypatch.setattr("promoe.runtime.checking.open_device", lambda name: FakeDevice())
    with pytest.raises(ConfigError, match=r"more bits for some experts of a layer \(--hot\), which only slots in RAM"):
        promoe.from_pretrained(folder, experts=tmp_path / "out", device="cuda")


def test_in_the_place_of_packed_experts_it_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantise(folder, folder / "promoe-packed")
    with caplog.at_level(logging.WARNING):
        model = promoe.from_pretrained(folder, cache="30%")
    assert model.promoe.runtime.engine.store.hot is None
    assert "They are quantised, which experts=FOLDER has to ask for. " in caplog.text
    model.promoe.close()
