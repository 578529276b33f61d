from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from gguf_checkpoints import write_gguf
from tiny_checkpoint import write_checkpoint

import promoe
from promoe.commands.quality.forms import read_form, read_forms
from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.kernels.quantized import Quantized
from promoe.model.opening import open_headers
from promoe.model.quantizing import Hot, write_quantized
from promoe.model.slot_folders import default_folder
from promoe.model.slot_index import INDEX
from promoe.scheduler import ExpertKey


def test_by_default_all_quantised_forms_beside_the_files(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    shutil.copytree(checkpoint.parent / "coarse", model / "promoe-int4-coarse")
    (model / "promoe-int3").mkdir()  # interrupted: it has no index
    found = read_forms(str(model), [])
    assert [form.experts for form in found] == [
        "checkpoint", "int8", "int4", str(model / "promoe-int4-coarse"), "int2",
    ]  # fmt: skip
    assert [form.name for form in found] == ["checkpoint", "int8", "int4", "promoe-int4-coarse", "int2"]


def test_forms_in_the_order_in_which_they_are_asked_for(checkpoint: Path) -> None:
    coarse = str(checkpoint.parent / "coarse")
    found = read_forms(str(checkpoint), ["int2", coarse])
    assert [(form.experts, form.name) for form in found] == [
        ("checkpoint", "checkpoint"), ("int2", "int2"), (coarse, "coarse"),
    ]  # fmt: skip


@pytest.mark.parametrize(("experts", "bits"), [("checkpoint", 16), ("int4", 4 + 32 / 32), ("int2", 2 + 32 / 32)])
def test_bits_of_a_weight(checkpoint: Path, experts: str, bits: float) -> None:
    assert read_form(str(checkpoint), experts).bits_per_weight == bits


@pytest.mark.parametrize("experts", ["int8", "int4"])
def test_sizes_are_those_of_the_slots(checkpoint: Path, experts: str) -> None:
    found = read_form(str(checkpoint), experts)
    model = promoe.from_pretrained(checkpoint, experts=experts, cache="50%")
    layout = model.promoe._pools[0].layout
    model.promoe.close()
    formats = [spec.format for spec in layout.tensors]
    weights = [spec.shape[0] * spec.shape[1] for spec in layout.tensors]
    bits = [made.bits_per_weight for made in formats if isinstance(made, Quantized)]
    assert len(bits) == len(weights) == 2
    mean = sum(one * count for one, count in zip(bits, weights, strict=True)) / sum(weights)
    assert found.bits_per_weight == pytest.approx(mean, rel=1e-12)
    assert found.nbytes == 3 * 8 * layout.slot_bytes


def test_a_form_of_two_formats_is_weighed_by_experts(checkpoint: Path, tmp_path: Path) -> None:
    opened = open_headers(str(checkpoint))
    hot = Hot(frozenset(ExpertKey(layer, idx) for layer in range(3) for idx in (0, 5)), Int4Format(4, 32))
    done = write_quantized(opened.layers, opened.store, tmp_path / "mixed", Int4Format(2, 32), hot=hot)
    opened.store.close()
    found = read_form(str(checkpoint), str(tmp_path / "mixed"))
    assert found.bits_per_weight == (6 * (2 + 32 / 32) + 2 * (4 + 32 / 32)) / 8
    assert found.nbytes == done.nbytes


def test_nothing_to_compare(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    message = (
        rf"There is nothing to compare: {model} has no folder promoe-int\* with an {INDEX}\. Write one with `promoe"
    )
    with pytest.raises(ConfigError, match=message):
        read_forms(str(model), [])


@pytest.mark.parametrize(
    ("experts", "message"), [("int3", r"promoe quantize MODEL --bits 3"), ("int5", "it is not a folder with an")]
)
def test_a_form_that_is_not_there(checkpoint: Path, experts: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_forms(str(checkpoint), ["int4", experts])


def test_forms_beside_a_gguf_file_have_its_name(tmp_path: Path) -> None:
    """A folder may have several of them."""
    for name in ("one [a]", "two"):
        path = write_gguf(tmp_path / "source", "qwen3_moe").rename(tmp_path / f"{name}.gguf")
        opened = open_headers(path)
        folder = default_folder(opened.store, "int4")
        assert folder == tmp_path / f"{name}.promoe-int4"
        if name == "two":
            opened.store.close()
            continue
        write_quantized(opened.layers, opened.store, folder, FORMATS["int4"])
        opened.store.close()
        assert [form.experts for form in read_forms(str(path), [])] == ["checkpoint", "int4"]
    with pytest.raises(ConfigError, match=r"has no folder two\.promoe-int\* with"):
        read_forms(str(tmp_path / "two.gguf"), [])


def test_parts_share_a_folder(tmp_path: Path) -> None:
    with closing(open_headers(write_gguf(tmp_path, "qwen3_moe", parts=2)).store) as store:
        assert default_folder(store, "packed") == tmp_path / "tiny-qwen3_moe-BF16.promoe-packed"
