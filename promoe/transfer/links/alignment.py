"""What a file asks of O_DIRECT: Linux 6.1 and later tell it per file, and often ask for far less than a page.

An NVMe disk typically wants offsets in multiples of 512 and addresses in multiples of 4, which every tensor of a
safetensors file meets: then every chunk can go straight into its slot.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

PAGE_BYTES = 4096
AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
STATX_BYTES = 256
DIO_FIELDS_OFFSET = 152  # of stx_dio_mem_align, followed by stx_dio_offset_align, in struct statx


class Alignment(NamedTuple):
    """Offsets and lengths must be multiples of `offset_bytes`, addresses of `memory_bytes`; both powers of two."""

    offset_bytes: int
    memory_bytes: int


WHOLE_PAGES = Alignment(PAGE_BYTES, PAGE_BYTES)
"""Enough for file systems on common hardware that do not tell."""


def direct_alignment(fd: int) -> Alignment:
    """What the file system says about an open file; whole pages where it says nothing that could be used."""
    answer = ctypes.create_string_buffer(STATX_BYTES)
    try:
        failed = ctypes.CDLL(None).statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer)
    except (AttributeError, OSError):  # not Linux, or an old C library
        return WHOLE_PAGES
    (known,) = struct.unpack_from("=I", answer, 0)
    memory_bytes, offset_bytes = struct.unpack_from("=II", answer, DIO_FIELDS_OFFSET)
    usable = all(0 < align <= PAGE_BYTES and PAGE_BYTES % align == 0 for align in (memory_bytes, offset_bytes))
    if failed or not known & STATX_DIOALIGN or not usable:
        return WHOLE_PAGES
    return Alignment(offset_bytes, memory_bytes)
