from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promoe.transfer.links.direct import (
    PAGE_BYTES,
    WHOLE_PAGES,
    Alignment,
    DirectFiles,
    DirectUnsupportedError,
    _skip,
    direct_alignment,
)
from promoe.transfer.memory import HugePageRegion

from .conftest import RawFile

pytestmark = pytest.mark.usefixtures("needs_direct")


@pytest.fixture
def files(whole_pages: None, raw_files: list[RawFile]) -> Iterator[DirectFiles]:
    files = DirectFiles({i: file.path for i, file in enumerate(raw_files)})
    yield files
    files.close()


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 3),
    offset_bytes=st.integers(0, 60_000),
    nbytes=st.integers(1, 40_003),
    shift_bytes=st.sampled_from([None, 0, 9]),
)
def test_reads_that_stop_half_way_are_continued(
    files: DirectFiles,
    raw_files: list[RawFile],
    blocks: int,
    offset_bytes: int,
    nbytes: int,
    shift_bytes: int | None,
) -> None:
    real, most_bytes = os.preadv, blocks * PAGE_BYTES

    def stops_half_way(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % PAGE_BYTES == 0
        left, short = most_bytes, []
        for buffer in buffers:
            short.append(buffer[:left])
            left -= len(short[-1])
        return real(fd, [buffer for buffer in short if len(buffer)], offset)

    shift_bytes = offset_bytes % PAGE_BYTES if shift_bytes is None else shift_bytes
    region = HugePageRegion(shift_bytes + nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stops_half_way)
        files.read(files.descriptor(0), offset_bytes, region.memory[shift_bytes:], region.address + shift_bytes)
    assert bytes(region.memory[shift_bytes:]) == raw_files[0].content[offset_bytes : offset_bytes + nbytes]


def test_a_read_that_ends_on_a_block_but_early_is_an_error(files: DirectFiles, monkeypatch: Any) -> None:
    calls: list[int] = []

    def ends(fd: int, buffers: object, offset: int) -> int:
        calls.append(offset)
        return 2 * PAGE_BYTES if len(calls) == 1 else 0

    monkeypatch.setattr(os, "preadv", ends)
    region = HugePageRegion(20_000)
    with pytest.raises(OSError, match="expected 20000 bytes at offset 4196, found 8092") as raised:
        files.read(files.descriptor(1), 4196, region.memory, region.address)
    assert calls == [4096, 4096 + 2 * PAGE_BYTES]
    assert raised.value.filename.endswith("part-1.bin")


def test_one_call_reads_head_middle_and_tail(
    files: DirectFiles, raw_files: list[RawFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[list[int]] = []
    real = os.preadv

    def record(fd: int, buffers: list[memoryview], offset: int) -> int:
        shapes.append([len(buffer) for buffer in buffers])
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", record)
    region = HugePageRegion(60_000)
    for offset_bytes, nbytes in ((100, 20_000), (4096, 8192), (4096, 8193), (100, 3996 + 4096), (5, 8000)):
        shift_bytes = offset_bytes % PAGE_BYTES
        target = region.memory[shift_bytes : shift_bytes + nbytes]
        files.read(files.descriptor(0), offset_bytes, target, region.address + shift_bytes)
        assert bytes(target) == raw_files[0].content[offset_bytes : offset_bytes + nbytes]
    # A range inside two blocks has no block of its own to go straight: it is staged.
    assert shapes == [[4096, 12_288, 4096], [8192], [8192, 4096], [4096, 4096], [8192]]


def test_a_staged_range_starts_where_it_says(files: DirectFiles, raw_files: list[RawFile]) -> None:
    region, start = files.stage(files.descriptor(0), 5_000, 10_000)
    assert start == 5_000 - 4096
    assert bytes(region.memory[start : start + 10_000]) == raw_files[0].content[5_000:15_000]


def test_closed_files_refuse(files: DirectFiles) -> None:
    files.close()
    with pytest.raises(OSError, match="closed"):
        files.descriptor(0)


def test_skip() -> None:
    buffers = [memoryview(b"abc"), memoryview(b"defg"), memoryview(b"h")]
    for nbytes in range(9):
        assert b"".join(_skip(buffers, nbytes)) == b"abcdefgh"[nbytes:]
        assert all(len(buffer) for buffer in _skip(buffers, nbytes))


@pytest.fixture
def finest(raw_files: list[RawFile]) -> Alignment:
    """Return what this machine really requires."""
    fd = os.open(raw_files[0].path, os.O_RDONLY)
    alignment = direct_alignment(fd)
    os.close(fd)
    return alignment


def test_a_device_that_asks_for_less_than_a_page_gets_more_straight_reads(
    raw_files: list[RawFile], finest: Alignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    if finest == WHOLE_PAGES:
        pytest.skip("the file system asks for whole pages, or does not tell")
    files = DirectFiles({i: file.path for i, file in enumerate(raw_files)})
    assert files.descriptor(0).alignment == finest
    monkeypatch.setattr(files, "stage", lambda *args: pytest.fail("the range was staged"))
    block_bytes, memory_bytes = finest
    region = HugePageRegion(40_000)
    for offset_bytes, shift_bytes in ((block_bytes, 0), (3 * block_bytes, memory_bytes), (block_bytes - 8, 4096 - 8)):
        target = region.memory[shift_bytes : shift_bytes + 20_000]
        files.read(files.descriptor(0), offset_bytes, target, region.address + shift_bytes)
        assert bytes(target) == raw_files[0].content[offset_bytes : offset_bytes + 20_000]
    files.close()


def test_an_alignment_that_the_kernel_refuses_is_not_believed(
    raw_files: list[RawFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promoe.transfer.links.direct.direct_alignment", lambda fd: Alignment(1, 1))
    files = DirectFiles({i: file.path for i, file in enumerate(raw_files)})
    assert [files.descriptor(idx).alignment for idx in range(2)] == [WHOLE_PAGES, WHOLE_PAGES]
    region = HugePageRegion(20_003)
    files.read(files.descriptor(0), 80_000, region.memory, region.address)
    assert bytes(region.memory) == raw_files[0].content[80_000:]
    files.close()


def test_a_device_error_at_opening_is_not_taken_for_a_missing_o_direct(
    raw_files: list[RawFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error") as raised:
        DirectFiles({0: raw_files[0].path})
    assert not isinstance(raised.value, DirectUnsupportedError)
