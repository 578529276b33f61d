"""Experts of a model in memory, written to files: what is in them, where they may be, and that nothing is left of a failure."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build
from untouched import open_files, opened_since

import promoe
from promoe.errors import ConfigError
from promoe.experts.moe_layers import MoELayer
from promoe.model import spool as module
from promoe.model.spool import file_system, spool
from promoe.scheduler import ExpertKey
from promoe.stores import HostStore, read_expert
from promoe.stores.layout import PAGE_BYTES
from promoe.transfer.links import FileLink

CHUNK_BYTES = 4096
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def layers() -> list[MoELayer]:
    return promoe.find_moe_layers(build("qwen2_moe", dtype=torch.bfloat16))


@pytest.fixture
def live(layers: list[MoELayer]) -> HostStore:
    return HostStore([layer.rows() for layer in layers], CHUNK_BYTES)


def slot_of(store: Any, key: ExpertKey) -> bytes:
    slot = bytearray(store.layouts[key.layer_idx].slot_bytes)
    read_expert(store, key, memoryview(slot))
    return bytes(slot)


def test_every_expert_is_there_as_it_was(layers: list[MoELayer], live: HostStore, tmp_path: Path) -> None:
    store, made = spool(layers, live, tmp_path, CHUNK_BYTES)
    folder = Path(made.name)
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0, "weights that others may read"
    assert [file.path.parent for file in store.files] == [folder] * len(layers)
    assert (store.layouts, store.num_experts, store.expert_bytes) == (live.layouts, live.num_experts, live.expert_bytes)
    for layer in layers:
        for expert_idx in range(layer.num_experts):
            key = ExpertKey(layer.layer_idx, expert_idx)
            assert slot_of(store, key) == slot_of(live, key)
            assert all(chunk.nbytes <= CHUNK_BYTES for chunk in store.chunks(key))
    made.cleanup()
    assert slot_of(store, ExpertKey(1, 3)) == slot_of(live, ExpertKey(1, 3)), "open files are read on"
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_slots_lie_as_direct_reads_want_them(layers: list[MoELayer], live: HostStore, tmp_path: Path) -> None:
    """The first slot begins at a page, and reads past the page cache give the same bytes."""
    store, made = spool(layers, live, tmp_path, CHUNK_BYTES)
    assert all(file.tensors["slots"].offset_bytes % PAGE_BYTES == 0 for file in store.files)
    link = FileLink(store, "direct", 1)
    key = ExpertKey(1, 3)
    slot = torch.zeros(store.layouts[1].slot_bytes, dtype=torch.uint8)
    for chunk in store.chunks(key):
        link.transfer(chunk, slot.numpy().data, slot.data_ptr())
    assert bytes(slot.numpy().data) == slot_of(live, key)
    link.close()
    store.close()
    made.cleanup()


def test_a_disk_that_is_too_small(
    layers: list[MoELayer], live: HostStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(layer.num_experts * layer.layout.slot_bytes for layer in layers)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda place: Usage(0, 0, needed - 1))
    with pytest.raises(ConfigError, match=r"experts take 288\.0 KiB, but .* has only 288\.0 KiB free.*spool_folder"):
        spool(layers, live, tmp_path, CHUNK_BYTES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_place_in_memory(
    layers: list[MoELayer], live: HostStore, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "file_system", lambda folder: kind)
    with pytest.raises(ConfigError, match=rf"is in RAM \({kind}\), so that no RAM would be freed.*spool_folder"):
        spool(layers, live, tmp_path, CHUNK_BYTES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), ConfigError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize("at_layer", [0, 2])
def test_a_failure_leaves_nothing(
    layers: list[MoELayer],
    live: HostStore,
    tmp_path: Path,
    error: BaseException,
    raised: type[BaseException],
    at_layer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, written, files = module.write_layer, [], open_files()

    def failing(*args: Any) -> None:
        if len(written) == at_layer:
            raise error
        written.append(args)
        write(*args)

    monkeypatch.setattr(module, "write_layer", failing)
    with pytest.raises(raised, match=r"could not be written .*No space left" if raised is ConfigError else None):
        spool(layers, live, tmp_path, CHUNK_BYTES)
    assert len(written) == at_layer
    assert list(tmp_path.iterdir()) == []
    assert not opened_since(files)


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    """By what the system says of its mounts, found by the device's number."""
    device = tmp_path.stat().st_dev
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF | device >> 12 & 0xFFF00}"
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    mounts = proc / "self" / "mountinfo"
    assert file_system(tmp_path, proc) is None
    lines = [
        "22 1 999:999 / /elsewhere rw - ramfs none rw",
        f"23 1 {number} / / rw,relatime shared:1 - xfs /dev/sda rw",
    ]
    mounts.write_text("\n".join(lines) + "\n")
    assert file_system(tmp_path, proc) == "xfs"
    mounts.write_text(lines[0] + "\ndamaged\n")
    assert file_system(tmp_path, proc) is None
    with pytest.raises(FileNotFoundError):
        file_system(tmp_path / "gone", proc)
