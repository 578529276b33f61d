"""Reads and checks the header of a GGUF file: values by key (the metadata), and where each tensor is.

The format is that of llama.cpp, versions 2 and 3, little-endian. A tensor's dimensions are there in the order of their
strides, the shortest first; here they are in the order of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from promoe.errors import CheckpointError
from promoe.stores.gguf_values import ValueReader
from promoe.stores.safetensors_header import END, TORCH_DTYPES, TensorRange

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# By the number of the type: its name, the elements of a block and the bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
# Numbers of types that ggml has withdrawn: their names, and types in which the same model can be quantised.
WITHDRAWN = {
    4: ("Q4_2", "Q4_K"),
    5: ("Q4_3", "Q4_K"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
# Forks of llama.cpp have numbers of their own, of some hundreds. A larger one is damage.
LARGEST_TYPE = 1023
# By name: the number of a type in blocks, and the bytes of a block with how many elements.
BLOCKS = {
    name: (kind, elements, nbytes) for kind, (name, elements, nbytes) in TYPES.items() if name not in TORCH_DTYPES
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        metadata: numbers, bools, strings and lists of them, by key, such as "general.architecture".
        tensors: by name. One in blocks has the shape of the weight and a dtype that torch does not have, such as "Q4_K".
    """

    metadata: Mapping[str, Any]
    tensors: dict[str, TensorRange]


class _OtherFormError(Exception):
    """A file is whole, and in a form that cannot be read. The message says what to do."""


def read_gguf_header(path: Path, fd: int, size_bytes: int, file_idx: int) -> GgufHeader:
    """Return the header of an open GGUF file of `size_bytes`.

    Raises:
        CheckpointError: the header is invalid, contradicts itself, describes a longer file, or is of another version or
            has types that are not known.
    """
    try:
        reader = ValueReader(fd, size_bytes)
        num_tensors, num_keys = _beginning(reader)
        metadata = _metadata(reader, num_keys)
        entries = _entries(reader, num_tensors)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {str(alignment)[:40]}, not a power of two")
        first_byte = -(-reader.offset_bytes // alignment) * alignment
        tensors = {
            name: replace(_tensor(name, entry, file_idx, first_byte, alignment), file_name=path.name)
            for name, entry in entries.items()
        }
        _check_layout(tensors, size_bytes)
    except _OtherFormError as error:
        raise CheckpointError(f"Cannot open {path}: {error}") from error
    except ValueError as error:  # UnicodeDecodeError too
        raise CheckpointError(
            f"{path} is not a sound GGUF file: {error}. Download or copy the checkpoint again."
        ) from error
    return GgufHeader(metadata, tensors)


def _beginning(reader: ValueReader) -> tuple[int, int]:
    """Return the number of tensors and of keys."""
    magic, (version,) = reader.take(len(MAGIC)), reader.numbers("I")
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian, version {swapped}" if swapped in (1, *VERSIONS) else f"version {version}"
        what = f"it is {kind}, and little-endian files of version 2 or 3 can be read"
        if version > max(VERSIONS) + 100 and swapped not in (1, *VERSIONS):
            raise ValueError(what)
        raise _OtherFormError(
            f"{what}. Get another file of the model, or convert the original again with llama.cpp's convert_hf_to_gguf.py."
        )
    num_tensors, num_keys = reader.numbers("QQ")
    reader.count(num_tensors, f"{num_tensors} tensors")
    reader.count(num_keys, f"{num_keys} keys")
    return num_tensors, num_keys


def _metadata(reader: ValueReader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"the key {key[:200]!r} is there twice")
        (kind,) = reader.numbers("I")
        try:
            metadata[key] = reader.value(kind)
        except ValueError as error:
            raise ValueError(f"the value of its key {key[:200]!r}: {error}") from error
    return metadata


def _entries(reader: ValueReader, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return the shape (of torch), the type and the offset of each tensor."""
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = reader.string()
        if name in entries:
            raise ValueError(f"the tensor {name[:200]!r} is there twice")
        (num_dimensions,) = reader.numbers("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(
                f"the tensor {name[:200]!r} has {num_dimensions} dimensions, and {MAX_DIMENSIONS} are allowed"
            )
        shape = reader.numbers(f"{num_dimensions}Q")[::-1]
        kind, offset_bytes = reader.numbers("IQ")
        entries[name] = shape, kind, offset_bytes
    return entries


def _tensor(
    name: str, entry: tuple[tuple[int, ...], int, int], file_idx: int, first_byte: int, alignment: int
) -> TensorRange:
    shape, kind, offset_bytes = entry
    if kind not in TYPES:
        raise _unknown_type(name, kind)
    dtype_name, block_elements, block_bytes = TYPES[kind]
    # Zeros are left out: torch also computes the strides of a tensor without elements.
    if math.prod(size for size in shape if size) * block_bytes >= END or offset_bytes >= END:
        raise ValueError(f"the tensor {name[:200]!r} of shape {list(shape)} at byte {offset_bytes} is too large")
    columns = shape[-1] if shape else 1
    if columns % block_elements:
        raise ValueError(
            f"the tensor {name[:200]!r} of shape {list(shape)} is in {dtype_name}, in blocks of {block_elements}, which do "
            f"not divide {columns}"
        )
    if offset_bytes % alignment:
        raise ValueError(f"the tensor {name[:200]!r} begins at byte {offset_bytes}, no multiple of {alignment}")
    nbytes = math.prod(shape) // block_elements * block_bytes
    return TensorRange(name, file_idx, first_byte + offset_bytes, nbytes, shape, dtype_name)


def _unknown_type(name: str, kind: int) -> Exception:
    what = f"the tensor {name[:200]!r} has type {kind}"
    if kind in WITHDRAWN:
        own, other = WITHDRAWN[kind]
        return _OtherFormError(
            f"{what} ({own}), which was withdrawn from ggml: llama.cpp does not read it either. Get a newer file of the model "
            f"(in {other}, for example), or quantise the original again with llama-quantize."
        )
    if kind <= LARGEST_TYPE:
        return _OtherFormError(
            f"{what}, which this version of promoe does not know: it is newer, or of a fork of llama.cpp. Update promoe, or "
            "open a file of the model in another type, such as Q4_K_M or Q8_0."
        )
    return ValueError(f"{what}, which GGUF does not have")


def _check_layout(tensors: Mapping[str, TensorRange], size_bytes: int) -> None:
    """Raise ValueError if tensors overlap, or the file ends before they do."""
    end, before = 0, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset_bytes, tensor.nbytes)):
        if tensor.offset_bytes < end:
            raise ValueError(f"{tensor.name[:200]!r} begins at byte {tensor.offset_bytes} and overlaps {before}")
        end, before = tensor.offset_bytes + tensor.nbytes, repr(tensor.name[:200])
    if end > size_bytes:
        raise ValueError(f"expected {end} bytes by its header, found {size_bytes} bytes (truncated)")
