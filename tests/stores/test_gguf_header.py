from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_bytes import array, file_bytes, key, sound, string, tensor

from promoe.errors import CheckpointError
from promoe.stores import gguf_header, gguf_values
from promoe.stores.gguf_header import BLOCKS, TYPES, WITHDRAWN, GgufHeader, read_gguf_header
from promoe.stores.safetensors_header import TensorRange


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_gguf_header(path, fd, len(content), 0)
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def fault(path: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path, content)
    assert str(caught.value).startswith(f"{path} is not a sound GGUF file: ")
    return str(caught.value)


def test_what_the_gguf_package_writes_is_read(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e6)
    writer.add_add_bos_token(False)
    writer.add_token_list(["a", "Ġthe", "ü", ""])
    writer.add_token_scores([-1.5, 0.0, 2.0, 3.0])
    writer.add_array("qwen3moe.sections", [1, -2])
    writer.add_uint64("big", 2**64 - 1)
    writer.add_float64("pi", 3.141592653589793)
    stored = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(6, dtype=np.float16).reshape(1, 2, 3)}
    for name, content in stored.items():
        writer.add_tensor(name, content)
    blocks = gguf.quants.quantize(np.ones((2, 5, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    header = read(path, content)
    assert header.metadata == {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 3,
        "qwen3moe.rope.freq_base": 1e6,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": ["a", "Ġthe", "ü", ""],
        "tokenizer.ggml.scores": [-1.5, 0.0, 2.0, 3.0],
        "qwen3moe.sections": [1, -2],
        "big": 2**64 - 1,
        "pi": 3.141592653589793,
    }
    shapes = {name: (one.shape, one.dtype_name) for name, one in header.tensors.items()}
    assert shapes == {"a": ((3, 4), "F32"), "b": ((1, 2, 3), "F16"), "c": ((2, 5, 64), "Q8_0")}
    for name, expected in (stored | {"c": blocks}).items():
        where = header.tensors[name]
        assert content[where.offset_bytes : where.offset_bytes + where.nbytes] == expected.tobytes()


def test_types_are_those_of_the_gguf_package() -> None:
    differ = {"Q8_1"}  # llama.cpp's own table says 36 bytes; no file has it
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert kind.name in differ or TYPES[kind.value] == (kind.name, *sizes)
    assert not {"F32", "BF16", "I32", "F64"} & set(BLOCKS)
    assert BLOCKS["Q4_K"] == (12, 256, 144)


def test_the_alignment_is_the_file_s_own(path: Path) -> None:
    content = file_bytes(
        [key("general.alignment", "u32", 64)],
        [tensor("a", (2,), "F32", 0), tensor("b", (3,), "I8", 64)],
        bytes(64) + b"abc",
        alignment=64,
    )
    header = read(path, content)
    assert [one.offset_bytes % 64 for one in header.tensors.values()] == [0, 0]
    b = header.tensors["b"]
    assert content[b.offset_bytes :] == b"abc"
    assert "multiple of 64" in fault(
        path,
        file_bytes([key("general.alignment", "u32", 64)], [tensor("a", (2,), "F32", 32)], bytes(99), alignment=64),
    )


def test_empty_tensors_and_scalars(path: Path) -> None:
    header = read(path, sound({"none": ((0, 4), "F32", b""), "one": ((), "F32", bytes(4))}))
    assert {name: (one.shape, one.nbytes) for name, one in header.tensors.items()} == {
        "none": ((0, 4), 0),
        "one": ((), 4),
    }


@pytest.mark.parametrize("version", [2, 3])
def test_versions(path: Path, version: int) -> None:
    assert read(path, file_bytes(version=version)) == GgufHeader({}, {})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "4 bytes at byte 0, and the file ends at byte 0 (truncated)"),
        (b"GGUF", "4 bytes at byte 4"),
        (b"GGML" + bytes(40), "begins with b'GGML'"),
        (file_bytes(version=2**20), f"version {2**20}"),
        (file_bytes(num_keys=2**63), f"more than {gguf_values.MAX_VALUES}"),
        (file_bytes(num_tensors=2**64 - 1), f"more than {gguf_values.MAX_VALUES}"),
        (file_bytes(num_keys=1), "truncated"),
        (file_bytes([string("k", 2**62)]), f"{2**62} bytes at byte 32"),
        (file_bytes([string("k") + struct.pack("<I", 13)]), "'k': a value has type 13"),
        (file_bytes([key("k", "str", string("v", 2**64 - 1))]), f"{2**64 - 1} bytes"),
        (file_bytes([key("k", "str", string(b"\xff\xfe"))]), "utf-8"),
        (file_bytes([key(b"\xff", "u8", 1)]), "utf-8"),
        (file_bytes([key("k", "u8", 1), key("k", "u8", 1)]), "the key 'k' is there twice"),
        (file_bytes([key("k", "arr", struct.pack("<IQ", 77, 0))]), "elements of type 77"),
        (file_bytes([key("k", "arr", array("u8", [], 2**40))]), f"an array of {2**40} elements"),
        (file_bytes([key("k", "arr", array("str", [], 2**61))]), f"an array of {2**61} elements"),
        (file_bytes([key("general.alignment", "u32", 0)]), "general.alignment is 0"),
        (file_bytes([key("general.alignment", "u32", 48)]), "general.alignment is 48"),
        (file_bytes([key("general.alignment", "str", "32")]), "general.alignment is 32, not"),
        (file_bytes([], [tensor("t", (1,) * 5, "F32", 0)], bytes(4)), "5 dimensions, and 4"),
        (file_bytes([], [tensor("t", (1,), 2**20, 0)], bytes(4)), f"'t' has type {2**20}, which GGUF does not have"),
        (file_bytes([], [tensor("t", (31,), "Q8_0", 0)], bytes(64)), "blocks of 32, which do not divide 31"),
        (file_bytes([], [tensor("t", (), "Q8_0", 0)], bytes(64)), "do not divide 1"),
        (file_bytes([], [tensor("t", (2**32, 2**31), "F32", 0)], bytes(4)), "too large"),
        (file_bytes([], [tensor("t", (0, 2**62, 2**62), "F32", 0)], bytes(4)), "too large"),
        (file_bytes([], [tensor("t", (1,), "F32", 2**63)], bytes(4)), "too large"),
        (file_bytes([], [tensor("t", (1,), "F32", 4)], bytes(8)), "begins at byte 4, no multiple of 32"),
        (file_bytes([], [tensor("t", (9,), "F32", 0)], bytes(35)), "(truncated)"),
        (file_bytes([], [tensor("t", (1,), "F32", 0), tensor("t", (1,), "F32", 32)], bytes(64)), "'t' is there twice"),
        (file_bytes([], [tensor("t", (9,), "F32", 0), tensor("u", (1,), "F32", 32)], bytes(64)), "'u' begins at byte"),
    ],
)  # fmt: skip
def test_faults_are_named(path: Path, content: bytes, what: str) -> None:
    assert what in fault(path, content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (file_bytes(version=1), "version 1, and little-endian files of version 2 or 3 .*another file .*convert"),
        (file_bytes(version=4), "version 4, .*another file .*convert"),
        (file_bytes(order=">"), "big-endian, version 3, .*another file .*convert"),
        *(
            (
                file_bytes([], [tensor("t", (32,), kind, 0)], bytes(64)),
                rf"'t' has type {kind} \({name}\), which was withdrawn from ggml.*\(in {other}, .*quantise the original again",
            )
            for kind, (name, other) in WITHDRAWN.items()
        ),
        (
            file_bytes([], [tensor("t", (1,), 99, 0)], bytes(4)),
            "'t' has type 99, which this version .*Update promoe, or",
        ),
    ],
)
def test_whole_files_in_other_forms(path: Path, content: bytes, what: str) -> None:
    """Downloading them again does not help."""
    with pytest.raises(CheckpointError, match=what) as caught:
        read(path, content)
    assert str(path) in str(caught.value)
    assert "ownload" not in str(caught.value)


def test_withdrawn_types_are_those_that_the_gguf_package_leaves_out() -> None:
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    assert set(WITHDRAWN) == set(range(max(TYPES))) - known - {*TYPES}


def test_nested_arrays_have_a_limit(path: Path) -> None:
    def nested(depth: int) -> bytes:
        content = array("u8", [7])
        for _ in range(depth):
            content = array("arr", [content])
        return content

    assert read(path, file_bytes([key("k", "arr", nested(3))])).metadata == {"k": [[[[7]]]]}
    assert "nested more than" in fault(path, file_bytes([key("k", "arr", nested(5))]))
    assert "nested more than" in fault(path, file_bytes([key("k", "arr", nested(3000))]))


def test_headers_are_read_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string may lie across the end of what was read, also its length."""
    monkeypatch.setattr(gguf_values, "STEP_BYTES", 5)
    texts = ["", "a", "bc" * 9, "ü", "x" * 100]
    header = read(path, file_bytes([key("t", "arr", array("str", texts)), key("n", "i64", -3)]))
    assert header.metadata == {"t": texts, "n": -3}


def test_a_lie_costs_no_memory(path: Path) -> None:
    """A long header is refused before it is read, and a long array before it is made."""
    many = file_bytes([key("k", "arr", array("u8", [], gguf_values.MAX_VALUES))], content=bytes(2**22))
    long = file_bytes([string("k", 200 * 2**20)])
    for content, size in ((many, len(many)), (long, 2**30)):
        path.write_bytes(content)
        os.truncate(path, size)
        fd = os.open(path, os.O_RDONLY)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"more than|at most"):
            read_gguf_header(path, fd, size, 0)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        tracemalloc.stop()
        os.close(fd)


def test_a_vocabulary_is_read_in_one_go(path: Path) -> None:
    """150,000 tokens and merges: not one read of the file for each."""
    tokens = [f"token{number}" for number in range(150_000)]
    content = file_bytes([key("t", "arr", array("str", tokens)), key("m", "arr", array("str", tokens))])
    reads: list[int] = []
    original = os.pread

    def counted(fd: int, nbytes: int, offset: int) -> bytes:
        reads.append(nbytes)
        return original(fd, nbytes, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_values.os, "pread", counted)
        header = read(path, content)
    assert header.metadata["m"] == tokens
    assert len(reads) <= len(content) // gguf_values.STEP_BYTES + 2


def test_tensors_follow_the_order_of_torch(path: Path) -> None:
    entry: Any = sound({"t": ((2, 3, 32), "Q8_0", bytes(2 * 3 * 34))})
    (found,) = read(path, entry).tensors.values()
    assert found == TensorRange("t", 0, found.offset_bytes, 204, (2, 3, 32), "Q8_0")
    assert found.dtype is None
    assert gguf_header.DEFAULT_ALIGNMENT == 32
