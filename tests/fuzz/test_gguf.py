"""GGUF files: their headers, bytes and parts. What promoe opens, the gguf package reads to the same bytes."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import array, file_bytes, key, nbytes, sound, string, tensor
from hypothesis import example, given
from hypothesis import strategies as st

from promoe.errors import CheckpointError
from promoe.model.gguf.finding import find_gguf
from promoe.stores import gguf_values
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.gguf import find_blocks
from promoe.stores.gguf_header import BLOCKS, GgufHeader, read_gguf_header
from promoe.stores.gguf_parts import locate_parts
from promoe.stores.tensor_files import TensorFile, TensorFiles

from .inputs import fuzzed, outcome
from .mutations import INTEGERS, damaged

KINDS = ("F32", "BF16", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "I8")
# By name: shape, type and bytes; every scale is an infinity or NaN in some of them.
TENSORS = {
    kind: ((2, 256), kind, bytes(number % 256 for number in range(nbytes((2, 256), kind)))) for kind in KINDS
} | {"nan": ((64,), "Q8_0", 68 * b"\xff"), "inf": ((256,), "Q4_K", 72 * b"\x00\x7c"), "one": ((), "F32", bytes(4))}
KEYS = [
    key("general.architecture", "str", "qwen3moe"),
    key("general.alignment", "u32", 32),
    key("a.float", "f32", float("nan")),
    key("a.list", "arr", array("i16", [1, -2])),
    key("a.texts", "arr", array("str", ["", "ä", "xyz"])),
    key("a.nested", "arr", array("arr", [array("u8", [1]), array("f64", [])])),
    key("a.big", "u64", 2**64 - 1),
    key("a.bool", "bool", True),
]
WHOLE = sound(TENSORS, KEYS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


Read = dict[str, tuple[tuple[int, ...], str, bytes]]
"""Shape, type and bytes of every tensor."""


def as_promoe_reads(path: Path) -> Read:
    """And that everything that can be decoded is decoded."""
    file = TensorFile.open(path)
    try:
        found: Read = {}
        for name, where in file.tensors.items():
            content = bytearray(where.nbytes)
            file.read_into(where.offset_bytes, memoryview(content))
            found[name] = (where.shape, where.dtype_name, bytes(content))
            try:
                weight = find_blocks({name: where})[name]
            except CheckpointError:
                continue
            if isinstance(weight, EncodedTensor) and weight.nbytes:
                blocks = torch.frombuffer(content, dtype=torch.uint8).view(weight.parts[0].shape)
                weight.encoding.decode([blocks], torch.empty(weight.shape, dtype=torch.bfloat16))
        return found
    finally:
        file.close()


def as_gguf_reads(path: Path) -> Read:
    return {
        one.name: (
            tuple(int(size) for size in reversed(one.shape)),
            one.tensor_type.name,
            np.ascontiguousarray(one.data).tobytes(),
        )
        for one in gguf.GGUFReader(path).tensors
    }


def check_file(target: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = outcome(target, lambda: as_promoe_reads(path))
    if not found:
        return
    try:
        expected = as_gguf_reads(path)
    except Exception:  # it refuses more, and says so in many ways
        return
    assert found == expected


@fuzzed(150)
@given(content=damaged(WHOLE))
@example(content=WHOLE)
def test_files(path: Path, content: bytes) -> None:
    check_file("gguf bytes", path, content)


def test_the_whole_file_is_read_as_the_gguf_package_reads_it(path: Path) -> None:
    path.write_bytes(WHOLE)
    found = as_promoe_reads(path)
    assert found == as_gguf_reads(path)
    assert found == TENSORS


LENGTHS = st.sampled_from((0, 1, 2, 7, 255, 2**16, 2**22, 2**31, 2**40, 2**61, 2**62, 2**63, 2**64 - 1))


@st.composite
def values(draw: st.DrawFn, depth: int = 0) -> tuple[str, Any]:
    """The kind of a value, and the value; its length may be a lie."""
    kind = draw(st.sampled_from(("u8", "i32", "f32", "bool", "str", "u64", "f64", "arr", "arr")))
    if kind == "str":
        return kind, string(draw(st.binary(max_size=9)), draw(st.none() | LENGTHS))
    if kind != "arr":
        return kind, draw(st.binary(min_size=8, max_size=8))[: struct.calcsize({"u8": "B", "i32": "i", "f32": "f",
                          "bool": "?", "u64": "Q", "f64": "d"}[kind])]  # fmt: skip
    if depth < 7 and draw(st.integers(0, 2)) == 0:
        inner = [draw(values(depth + 1)) for _ in range(draw(st.integers(0, 2)))]
        return kind, array("arr", [content for one, content in inner if one == "arr"], draw(st.none() | LENGTHS))
    if draw(st.booleans()):
        return kind, array("str", draw(st.lists(st.text(max_size=4), max_size=4)), draw(st.none() | LENGTHS))
    if draw(st.integers(0, 9)) == 0:
        return kind, struct.pack("<IQ", draw(st.integers(0, 20)), draw(LENGTHS)) + draw(st.binary(max_size=20))
    return kind, array("u16", draw(st.lists(st.integers(0, 9), max_size=4)), draw(st.none() | LENGTHS))


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Any keys and tensors, of any size, type and place; counts may lie."""
    keys = [key(draw(st.sampled_from("abc")), *draw(values())) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        keys.append(key("general.alignment", "u32", draw(st.sampled_from((0, 1, 8, 32, 33, 64, 2**31)))))
    sizes = st.sampled_from((0, 1, 2, 31, 32, 256, 2**20, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))
    entries, end = [], 0
    for _ in range(draw(st.integers(0, 4))):
        kind: Any = draw(st.sampled_from(("F32", "Q8_0", "Q4_K", "BF16", 4, 5, 31, 39, 2**32 - 1)))
        shape = draw(st.lists(sizes, max_size=draw(st.sampled_from((2, 2, 4, 6)))))
        place = end if draw(st.integers(0, 3)) else draw(st.sampled_from((0, 1, 32, 64, 2**40, 2**63, 2**64 - 1)))
        entries.append(tensor(draw(st.sampled_from(("x", "y", "z", "ä", ""))), shape, kind, place))
        end = place + 32 if place < 2**40 else place
    return file_bytes(
        keys,
        entries,
        bytes(draw(st.sampled_from((0, 31, 4096)))),
        version=draw(st.sampled_from((2, 3, 3, 3, 3, 1, 0, 2**31))),
        num_keys=draw(st.sampled_from((None,) * 7 + (0, 2**22, 2**64 - 1))),
        num_tensors=draw(st.sampled_from((None,) * 7 + (0, 5, 2**22, 2**64 - 1))),
    )


@fuzzed(150)
@given(content=headers())
@example(content=file_bytes([key("k", "arr", array("arr", [], 2**61))]))
@example(content=file_bytes([key("k", "arr", struct.pack("<IQ", 9, 1) * 10_000)]))
def test_headers(path: Path, content: bytes) -> None:
    check_file("gguf header", path, content)


def read(path: Path) -> GgufHeader:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_gguf_header(path, fd, path.stat().st_size, 0)
    finally:
        os.close(fd)


def test_no_header_takes_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read has a limited number of values and of bytes; what claims more is refused before it is read."""
    most, longest = 2**14, 2**20
    monkeypatch.setattr(gguf_values, "MAX_VALUES", most)
    monkeypatch.setattr(gguf_values, "MAX_HEADER_BYTES", longest)
    for content in (
        file_bytes([key("k", "arr", array("str", [], most - 9) + bytes(8 * most))]),
        file_bytes([key("k", "arr", array("str", ["xyz"] * (most - 9)))]),
        file_bytes([key("k", "arr", array("f64", [0.5] * (most - 9)))]),
        file_bytes([key(f"k{idx}", "arr", array("u8", [7] * (most - 9))) for idx in range(3)]),
        file_bytes([key("k", "str", string(b"x" * (longest - 99)))]),
        file_bytes([key("k", "str", string(b"x" * (8 * longest)))]),
    ):
        path.write_bytes(content)
        tracemalloc.start()
        try:
            outcome("gguf header", lambda: read(path))
            assert tracemalloc.get_traced_memory()[1] < 96 * most + 5 * longest
        finally:
            tracemalloc.stop()


PART = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


@fuzzed(60)
@given(data=st.data())
def test_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Numbers and counts of parts, names of files and of tensors."""
    folder = tmp_path_factory.mktemp("parts")
    small = st.sampled_from((0, 1, 2, 3, 2**16 - 1))
    for idx, name in enumerate(PART):
        keys = [key("general.architecture", "str", "qwen3moe")]
        for field, default in (("no", idx), ("count", 2), ("tensors.count", 2)):
            number = default if data.draw(st.integers(0, 3)) else data.draw(small | st.sampled_from(("x", None)))
            keys.append(key(f"split.{field}", *(("str", "x") if number in ("x", None) else ("u16", number))))
        named = data.draw(st.sampled_from((f"t{idx}", f"t{idx}", f"t{idx}", "t0")))
        file = folder / data.draw(st.sampled_from((name, name, name, "m.gguf")))
        file.write_bytes(sound({named: ((1,), "F32", bytes(4))}, keys))

    outcome("gguf parts", lambda: TensorFiles.open(locate_parts(find_gguf(folder)[0])))
    shutil.rmtree(folder)


@pytest.mark.parametrize("value", [one for one in INTEGERS if one < 2**64 and one >= 0])
def test_offsets_and_sizes(path: Path, value: int) -> None:
    for shape, offset in (((value,), 0), ((32, value), 0), ((1,), value), ((value,) * 4, value)):
        for kind in ("F32", "Q8_0", "Q4_K"):
            check_file("gguf header", path, file_bytes([], [tensor("t", shape, kind, offset)], bytes(64)))


def test_every_block_type_is_decoded_or_refused(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in BLOCKS:
        content = (
            torch.randint(256, (nbytes((3, 256), kind),), dtype=torch.uint8, generator=generator).numpy().tobytes()
        )
        check_file("gguf bytes", path, sound({"t": ((3, 256), kind, content)}))
        path.write_bytes(sound({"t": ((3, 256), kind, len(content) * b"\xff")}))
        as_promoe_reads(path)
