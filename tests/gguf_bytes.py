"""GGUF files byte by byte, sound or not, without the `gguf` package, which writes sound ones only."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from promoe.stores.gguf_header import TYPES

KINDS = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "arr": 9, "u64": 10,
    "i64": 11, "f64": 12,
}  # fmt: skip
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPE_IDS = {name: kind for kind, (name, _, _) in TYPES.items()}


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string; its length may be another one than it has."""
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if length is None else length) + content


def value(kind: str, content: Any) -> bytes:
    """The type of a value, and the value; bytes are taken as they are."""
    number = KINDS[kind]
    if isinstance(content, bytes):
        return struct.pack("<I", number) + content
    if kind == "str":
        return struct.pack("<I", number) + string(content)
    return struct.pack(f"<I{_CODES[number]}", number, content)


def array(kind: str, elements: Sequence[Any], length: int | None = None) -> bytes:
    """The content of a value of kind "arr"."""
    number = KINDS[kind]
    head = struct.pack("<IQ", number, len(elements) if length is None else length)
    if kind == "str":
        return head + b"".join(map(string, elements))
    if kind == "arr":
        return head + b"".join(elements)
    return head + struct.pack(f"<{len(elements)}{_CODES[number]}", *elements)


def key(name: str | bytes, kind: str, content: Any) -> bytes:
    """A key and its value."""
    return string(name) + value(kind, content)


def tensor(name: str, shape: Sequence[int], kind: str | int, offset_bytes: int) -> bytes:
    """The entry of a tensor of a shape in the order of torch."""
    number = TYPE_IDS[kind] if isinstance(kind, str) else kind
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dimensions + struct.pack("<IQ", number, offset_bytes)


def file_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    content: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    order: str = "<",
) -> bytes:
    """A file of keys, entries of tensors and the tensors' bytes."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + content


def sound(tensors: Mapping[str, tuple[tuple[int, ...], str, bytes]], keys: Sequence[bytes] = ()) -> bytes:
    """A file of whole tensors: shape, type and bytes by name."""
    entries, content = [], b""
    for name, (shape, kind, stored) in tensors.items():
        content += bytes(-len(content) % 32)
        entries.append(tensor(name, shape, kind, len(content)))
        content += stored
    return file_bytes(keys, entries, content + bytes(-len(content) % 32))


def nbytes(shape: Sequence[int], kind: str) -> int:
    """The bytes of a tensor."""
    _, elements, size = TYPES[TYPE_IDS[kind]]
    return math.prod(shape) // elements * size
