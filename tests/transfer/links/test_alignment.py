from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from promoe.transfer.links.direct import STATX_DIOALIGN, WHOLE_PAGES, Alignment, direct_alignment


class FakeLibrary:
    """A C library whose statx fills in the given answer."""

    def __init__(self, known: int, memory_bytes: int, offset_bytes: int, failed: int = 0) -> None:
        self.answer = (known, memory_bytes, offset_bytes)
        self.failed = failed

    def statx(self, fd: int, path: bytes, flags: int, mask: int, answer: Any) -> int:
        assert (fd, path, mask) == (7, b"", STATX_DIOALIGN)
        known, memory_bytes, offset_bytes = self.answer
        struct.pack_into("=I", answer, 0, known)
        struct.pack_into("=II", answer, 152, memory_bytes, offset_bytes)
        return self.failed


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (FakeLibrary(0x37FF, 4, 512), Alignment(512, 4)),
        (FakeLibrary(STATX_DIOALIGN, 4096, 4096), WHOLE_PAGES),
        (FakeLibrary(0x17FF, 4, 512), WHOLE_PAGES),  # the kernel does not know the question
        (FakeLibrary(0x37FF, 0, 0), WHOLE_PAGES),  # no O_DIRECT for this file
        (FakeLibrary(0x37FF, 4, 65_536), WHOLE_PAGES),
        (FakeLibrary(0x37FF, 3, 512), WHOLE_PAGES),
        (FakeLibrary(0x37FF, 4, 512, failed=-1), WHOLE_PAGES),
        (object(), WHOLE_PAGES),  # a C library without statx
    ],
)
def test_what_the_kernel_says_is_taken_if_it_makes_sense(
    library: object, expected: Alignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert direct_alignment(7) == expected


def test_a_bad_descriptor_gets_whole_pages() -> None:
    assert direct_alignment(-5) == WHOLE_PAGES
