"""Safetensors files and indexes of a checkpoint: what promoe opens, the safetensors library opens too, to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from promoe.errors import CheckpointError
from promoe.stores.tensor_files import INDEX_NAME, WEIGHTS_NAME, TensorFile, TensorFiles, locate_files

from .inputs import fuzzed, outcome
from .mutations import DEEP, INTEGERS, VALUES, damaged, json_bytes

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.arange(5).to(torch.bfloat16),
    "c": torch.arange(4, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
}


def file_bytes(header: bytes, data: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", (len(header) if claimed is None else claimed) % 2**64) + header + data


def saved() -> tuple[dict[str, Any], bytes]:
    """(header, bytes of the tensors)."""
    content = save(TENSORS, {"format": "pt"})
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


HEADER, DATA = saved()
WHOLE = file_bytes(json.dumps(HEADER).encode(), DATA)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / WEIGHTS_NAME


Read = dict[str, tuple[tuple[int, ...], str, bytes]]
"""Shape, dtype and bytes of every tensor."""


def as_promoe_reads(path: Path) -> tuple[Read, bytes]:
    """And the same header as the format has it: unknown formats as bytes, nothing that is not needed."""
    file = TensorFile.open(path)
    first_byte = min((where.offset_bytes for where in file.tensors.values()), default=file.size_bytes)
    result, header = {}, {}
    try:
        for name, where in file.tensors.items():
            content = bytearray(where.nbytes)
            file.read_into(where.offset_bytes, memoryview(content))
            plain = ("U8", [where.nbytes]) if where.dtype is None else (where.dtype_name, list(where.shape))
            start = where.offset_bytes - first_byte
            header[name] = {"dtype": plain[0], "shape": plain[1], "data_offsets": [start, start + where.nbytes]}
            result[name] = (where.shape, where.dtype_name, bytes(content))
    finally:
        file.close()
    return result, json.dumps(header).encode()


def as_safetensors_reads(content: bytes) -> Read:
    return {
        name: (tuple(tensor["shape"]), tensor["dtype"], bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(content)
    }


def check_file(target: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = outcome(target, lambda: as_promoe_reads(path))
    try:
        expected = as_safetensors_reads(content)
    except safetensors.SafetensorError:
        if found is None:
            return
        # What else there may be in a header (metadata, formats of the future) is not for promoe to judge.
        data = content[8 + struct.unpack("<Q", content[:8])[0] :]
        read = as_safetensors_reads(file_bytes(found[1], data))
        assert {name: content for name, (_, _, content) in read.items()} == {
            name: content for name, (_, _, content) in found[0].items()
        }
    else:
        assert found is None or found[0] == expected


entries: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(("F32", "BF16", "U8", "F4", "F64", "I64", "", "f32")),
        "shape": st.lists(st.sampled_from(INTEGERS) | st.integers(-1, 8), max_size=5),
        "data_offsets": st.lists(st.sampled_from(INTEGERS) | st.integers(-1, len(DATA) + 2), max_size=3),
    },
)


@fuzzed(120)
@given(
    header=json_bytes(HEADER, VALUES | entries),
    claimed=st.none() | st.sampled_from((0, 1, 2, 9, 2**31, 2**40, 2**63, -1)),
)
@example(
    header=json.dumps(HEADER | {"c": {"dtype": "U8", "shape": "4", "data_offsets": [34, 38]}}).encode(), claimed=None
)
@example(
    header=json.dumps(HEADER | {"c": {"dtype": "U8", "shape": [4.0], "data_offsets": [34, 38]}}).encode(), claimed=None
)
@example(
    header=json.dumps(HEADER | {"c": {"dtype": "U8", "shape": [True, 4], "data_offsets": [34, 38]}}).encode(),
    claimed=None,
)
@example(header=b"[" * DEEP, claimed=None)
def test_headers(path: Path, header: bytes, claimed: int | None) -> None:
    check_file("safetensors header", path, file_bytes(header, DATA, claimed))


@fuzzed(120)
@given(content=damaged(WHOLE))
def test_files(path: Path, content: bytes) -> None:
    check_file("safetensors bytes", path, content)


@st.composite
def layouts(draw: st.DrawFn) -> bytes:
    """A header whose tensors lie anywhere: beside, over and behind each other."""
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    header, end = {}, 0
    for name in names:
        start = end if draw(st.integers(0, 4)) else draw(st.integers(0, 12))
        nbytes = draw(st.integers(0, 8))
        shape = draw(st.sampled_from(([nbytes], [1, nbytes], [nbytes, 1, 1], [0, 2**62, 2**62], [nbytes + 1])))
        dtype = draw(st.sampled_from(("U8", "U8", "U8", "I8", "BOOL", "F4", "WHAT")))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
        end = start + nbytes
    return file_bytes(json.dumps(header).encode(), bytes(range(max(0, end + draw(st.sampled_from((0, 0, 0, 1, -1)))))))


@fuzzed(120)
@given(content=layouts())
@example(
    content=file_bytes(
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
        b"abc",
    )
)
@example(content=file_bytes(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}', b"abc"))
def test_layouts(path: Path, content: bytes) -> None:
    check_file("safetensors layout", path, content)


SHARDS = {"one.safetensors": ("a", "c"), "two.safetensors": ("b.weight", "empty")}
INDEX = {"metadata": {"total_size": 38}, "weight_map": {name: file for file, names in SHARDS.items() for name in names}}
NAMES = (
    "one.safetensors", "two.safetensors", "../outside.safetensors", "../../etc/passwd", "/etc/passwd", "./one.safetensors",
    "inside/../one.safetensors", "folder", "fifo", "link.safetensors", "..", ".", "", "/", "//x", "a\0b", "\ud800", "x" * 5000,
    "inside/one.safetensors", "zero", "inside/../../outside.safetensors", "C:\\x", "..\\x",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files, and beside them what an index must not name."""
    root = tmp_path_factory.mktemp("fuzz")
    folder = root / "checkpoint"
    (folder / "folder").mkdir(parents=True)
    (folder / "inside").mkdir()
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    shutil.copy(folder / "one.safetensors", folder / "inside" / "one.safetensors")
    shutil.copy(folder / "one.safetensors", root / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(root / "outside.safetensors")  # as the hub's cache has them
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo")
    return folder


def open_index(folder: Path) -> dict[str, bytes]:
    files = TensorFiles.open(locate_files(folder))
    try:
        for file in files.files:
            assert folder in file.path.parents, file.path
            assert ".." not in file.path.relative_to(folder).parts
        result = {}
        for name, where in files.tensors.items():
            content = bytearray(where.nbytes)
            files.read_into(where, memoryview(content))
            result[name] = bytes(content)
        return result
    finally:
        files.close()


def check_index(folder: Path, content: bytes) -> None:
    (folder / INDEX_NAME).write_bytes(content)
    found = outcome("safetensors index", lambda: open_index(folder))
    for name, content in (found or {}).items():
        assert content == TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes(), name


def index_of(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": dict(zip(INDEX["weight_map"], names, strict=False))}).encode()


@fuzzed(120)
@given(content=json_bytes(INDEX, VALUES | st.sampled_from(NAMES)))
@example(content=json.dumps({"weight_map": {"a": 3}}).encode())
@example(content=b'{"weight_map": ' + b"[" * DEEP)
@example(content=index_of("a\0b"))
@example(content=index_of("../outside.safetensors"))
@example(content=index_of("/etc/passwd"))
@example(content=index_of("fifo"))
@example(content=index_of("folder"))
@example(content=index_of("zero"))
@example(content=index_of("x" * 5000))
def test_indexes(folder: Path, content: bytes) -> None:
    check_index(folder, content)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "inside/../../outside.safetensors", ".."])
def test_an_index_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / INDEX_NAME).write_bytes(index_of(name))
    with pytest.raises(CheckpointError, match="outside"):
        locate_files(folder)


def test_links_out_of_the_folder_are_followed(folder: Path) -> None:
    """The hub's cache is made of them."""
    (folder / INDEX_NAME).write_bytes(index_of("link.safetensors", "link.safetensors"))
    assert {"a", "c"} <= set(open_index(folder))
