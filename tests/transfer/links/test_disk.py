from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, ChunkPart, Store
from promoe.transfer.links import FileLink, Link
from promoe.transfer.links.direct import DirectFiles
from promoe.transfer.links.disk import drop_files
from promoe.transfer.memory import HugePageRegion

from .conftest import MakeStore, RawFile, RawFileStore

CANARY = 0xA5
GIB = 1024**3
any_example = settings(max_examples=150)


class Slot:
    """A slot full of canary bytes that starts `shift_bytes` behind a page boundary."""

    def __init__(self, nbytes: int, shift_bytes: int = 0) -> None:
        region = HugePageRegion(shift_bytes + nbytes)
        region.fill(CANARY)
        self.memory = region.memory[shift_bytes:]
        self.address = region.address + shift_bytes

    def bytes_of(self, chunk: Chunk) -> bytes:
        return bytes(self.memory[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes])

    def untouched_outside(self, chunk: Chunk) -> bool:
        content = bytes(self.memory)
        outside = content[: chunk.slot_offset_bytes] + content[chunk.slot_offset_bytes + chunk.nbytes :]
        return outside == bytes([CANARY]) * len(outside)


def plain(offset_bytes: int, nbytes: int, slot_offset_bytes: int = 0, source_idx: int = 0) -> Chunk:
    return Chunk(slot_offset_bytes, nbytes, source_idx, offset_bytes, nbytes)


@pytest.fixture
def link(mode: Any, raw_files: list[RawFile]) -> Iterator[FileLink]:
    store = RawFileStore(raw_files, [[plain(0, 10)]])
    link = FileLink(store, mode)
    assert link.mode == mode
    yield link
    link.close()
    store.close()


@st.composite
def chunks_of_file_0(draw: st.DrawFn) -> Chunk:
    """Any range of a file of 100,003 bytes, often at and around block boundaries and the end."""
    near_block = st.builds(lambda block, by: max(0, block * 4096 + by), st.integers(0, 24), st.integers(-2, 2))
    offset_bytes = draw(st.one_of(st.integers(0, 100_002), near_block))
    left = 100_003 - offset_bytes
    nbytes = draw(st.one_of(st.integers(1, left), st.just(left), near_block.map(lambda n: min(max(n, 1), left))))
    congruent = st.integers(0, 3).map(lambda blocks: blocks * 4096 + offset_bytes % 4096)
    return plain(offset_bytes, nbytes, draw(st.one_of(st.integers(0, 9000), congruent)))


@any_example
@given(chunk=chunks_of_file_0(), shift_bytes=st.one_of(st.just(0), st.integers(0, 4095)))
def test_any_range_lands_at_any_address_and_nothing_else_changes(
    link: FileLink, raw_files: list[RawFile], chunk: Chunk, shift_bytes: int
) -> None:
    slot = Slot(chunk.slot_offset_bytes + chunk.nbytes + 5000, shift_bytes)
    link.transfer(chunk, slot.memory, slot.address)
    start = chunk.source_offset_bytes
    assert slot.bytes_of(chunk) == raw_files[0].content[start : start + chunk.nbytes]
    assert slot.untouched_outside(chunk)


@any_example
@given(
    ranges=st.lists(
        st.one_of(
            st.tuples(st.just(0), st.integers(0, 20_000), st.integers(1, 80_000)),
            st.tuples(st.just(1), st.integers(0, 4000), st.integers(1, 66_000)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_all_parts_of_a_chunk_are_read_whatever_their_length(
    link: FileLink, raw_files: list[RawFile], ranges: list[tuple[int, int, int]]
) -> None:
    parts, end = [], 0
    for source_idx, offset_bytes, nbytes in ranges:
        parts.append(ChunkPart(source_idx, offset_bytes, nbytes, end, (nbytes,), torch.uint8))
        end += -(-nbytes // 64) * 64
    total_bytes = sum(part.nbytes for part in parts)

    def joined(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.cat(list(tensors), out=out)

    last = parts[-1]
    source_bytes = last.offset_bytes + last.nbytes
    first = parts[0].source_idx, parts[0].source_offset_bytes
    chunk = Chunk(64, total_bytes, *first, source_bytes, torch.uint8, torch.uint8, tuple(parts), joined)
    slot = Slot(64 + total_bytes + 64)
    link.transfer(chunk, slot.memory, slot.address)
    expected = b"".join(raw_files[idx].content[start : start + nbytes] for idx, start, nbytes in ranges)
    assert slot.bytes_of(chunk) == expected
    assert slot.untouched_outside(chunk)


def test_a_chunk_comes_from_the_file_it_names(link: FileLink, raw_files: list[RawFile]) -> None:
    chunk = plain(20_000, 50_000, 64, source_idx=1)
    slot = Slot(60_000)
    link.transfer(chunk, slot.memory, slot.address)
    assert slot.bytes_of(chunk) == raw_files[1].content[20_000:70_000]


@pytest.mark.usefixtures("needs_direct")
@pytest.mark.parametrize(("offset_bytes", "slot_offset_bytes"), [(4096, 0), (5000, 904), (12_345, 4153)])
def test_direct_reads_go_straight_into_a_slot_that_is_congruent(
    raw_files: list[RawFile], monkeypatch: pytest.MonkeyPatch, offset_bytes: int, slot_offset_bytes: int
) -> None:
    store = RawFileStore(raw_files, [[plain(0, 10)]])
    link = FileLink(store, "direct")
    monkeypatch.setattr(DirectFiles, "stage", lambda *args: pytest.fail("the chunk was staged"))
    monkeypatch.setattr(store, "read", lambda *args: pytest.fail("the chunk was read through the page cache"))
    chunk, slot = plain(offset_bytes, 30_000, slot_offset_bytes), Slot(40_000)
    link.transfer(chunk, slot.memory, slot.address)
    assert slot.bytes_of(chunk) == store.expected(chunk)
    assert slot.untouched_outside(chunk)


@pytest.mark.parametrize(
    ("source_dtype", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
@pytest.mark.parametrize("start_bytes", [0, 8, 4096, 5001])
def test_conversion_on_arrival_rounds_like_torch(
    mode: Any, make_store: MakeStore, source_dtype: torch.dtype, dtype: torch.dtype, start_bytes: int
) -> None:
    source = torch.randn(70_001).to(source_dtype)
    content = bytes(start_bytes) + source.view(torch.uint8).numpy().tobytes() + b"rest"
    chunk = Chunk(64, 70_001 * dtype.itemsize, 0, start_bytes, 70_001 * source_dtype.itemsize, source_dtype, dtype)
    link = FileLink(make_store([content], [[chunk]]), mode)
    slot = Slot(chunk.nbytes + 200)
    link.transfer(chunk, slot.memory, slot.address)
    arrived = torch.frombuffer(bytearray(slot.bytes_of(chunk)), dtype=dtype)
    assert torch.equal(arrived, source.to(dtype))
    assert slot.untouched_outside(chunk)
    link.close()


def test_three_threads_fill_different_slots(mode: Any, make_store: MakeStore) -> None:
    rng = random.Random(1)
    content = rng.randbytes(3 * 400_000 + 17)
    experts = [
        [plain(expert * 8_000 + part * 3_001 + 17, 3_001, 128 + part * 3_001) for part in range(4)]
        for expert in range(60)
    ]
    converted = Chunk(16_000, 8_000, 0, 1001, 4_000, torch.bfloat16, torch.float32)
    store = make_store([content], [[*chunks, converted] for chunks in experts])
    link = FileLink(store, mode, workers=3)
    slots = [Slot(24_000, shift_bytes=expert % 7) for expert in range(60)]

    def fill(expert: int) -> None:
        for chunk in store.chunks(ExpertKey(0, expert)):
            link.transfer(chunk, slots[expert].memory, slots[expert].address)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fill, range(60)))
    as_bf16 = torch.frombuffer(bytearray(content[1001:5001]), dtype=torch.bfloat16)
    as_fp32 = as_bf16.float().view(torch.uint8).numpy().tobytes()
    for expert in range(60):
        expected = bytearray([CANARY]) * 24_000
        for chunk in experts[expert]:
            expected[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes] = store.expected(chunk)
        expected[16_000:24_000] = as_fp32
        assert bytes(slots[expert].memory) == bytes(expected), expert
    link.close()


def test_two_threads_fill_neighbouring_chunks_of_one_slot(mode: Any, make_store: MakeStore) -> None:
    content = os.urandom(300_000)
    chunks = [plain(77 + start, min(4_999, 250_000 - start), 77 + start) for start in range(0, 250_000, 4_999)]
    link = FileLink(make_store([content], [chunks]), mode)
    slot = Slot(260_000)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda chunk: link.transfer(chunk, slot.memory, slot.address), chunks))
    assert bytes(slot.memory) == bytes([CANARY]) * 77 + content[77:250_077] + bytes([CANARY]) * 9_923
    link.close()


@pytest.mark.parametrize("left_bytes", [0, 4096, 8192, 10_000, 44_500, 44_999])
def test_a_file_truncated_while_running_is_an_error_not_zeros(
    mode: Any, make_store: MakeStore, left_bytes: int
) -> None:
    store = make_store([os.urandom(50_000)], [[plain(5_000, 40_000)]])
    link = FileLink(store, mode)
    os.truncate(store.files[0].path, left_bytes)
    for chunk in (plain(5_000, 40_000, 904), plain(5_000, 40_000, 5)):  # straight and staged
        slot = Slot(50_000)
        with pytest.raises(OSError, match=f"offset 5000, found {max(0, left_bytes - 5_000)}:") as raised:
            link.transfer(chunk, slot.memory, slot.address)
        assert raised.value.filename == str(store.files[0].path)
        assert slot.untouched_outside(chunk)
    link.close()


@pytest.mark.usefixtures("needs_direct")
def test_a_device_error_names_file_offset_and_cause(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store([os.urandom(50_000)], [[plain(5_000, 40_000)]])
    link = FileLink(store, "direct")

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    slot = Slot(50_000)
    with pytest.raises(OSError, match=r"40000 bytes at offset 5000 .*Input/output error") as raised:
        link.transfer(plain(5_000, 40_000), slot.memory, slot.address)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(store.files[0].path))
    monkeypatch.undo()
    chunk = plain(5_000, 40_000)
    link.transfer(chunk, slot.memory, slot.address)  # the link stays usable
    assert slot.bytes_of(chunk) == store.expected(chunk)
    link.close()


def test_a_missing_file_is_an_error_at_creation(mode: Any, make_store: MakeStore) -> None:
    store = make_store([b"x" * 100], [[plain(0, 10)]])
    store.files[0].path.unlink()
    if mode == "direct":
        with pytest.raises(FileNotFoundError, match=store.files[0].path.name):
            FileLink(store, mode)
    else:  # reads by the store, which still holds the file
        slot = Slot(10)
        FileLink(store, mode).transfer(plain(0, 10), slot.memory, slot.address)
        assert bytes(slot.memory) == b"x" * 10


def refuse_direct_open(path: Any, flags: int, *args: Any, real: Callable[..., int] = os.open) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    return real(path, flags, *args)


def refuse_direct_read(fd: int, *args: Any, real: Callable[..., int] = os.preadv) -> int:
    import fcntl

    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return real(fd, *args)


@pytest.mark.usefixtures("needs_direct")
@pytest.mark.parametrize(("name", "refusal"), [("open", refuse_direct_open), ("preadv", refuse_direct_read)])
def test_without_o_direct_the_page_cache_is_used_with_one_warning(
    name: str,
    refusal: Callable[..., int],
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk = plain(5_000, 40_000, 3)
    store = make_store([os.urandom(50_000), os.urandom(5_000)], [[chunk]])
    monkeypatch.setattr(os, name, refusal)
    with caplog.at_level(logging.WARNING, logger="promoe"):
        link = FileLink(store, "direct")
        slot = Slot(50_000)
        for _ in range(3):
            link.transfer(chunk, slot.memory, slot.address)
    assert slot.bytes_of(chunk) == store.expected(chunk)
    assert link.mode == "page_cache"
    assert "no O_DIRECT" in link.describe()
    assert len(caplog.records) == 1
    assert "through the page cache" in caplog.text


def test_a_system_without_o_direct_uses_the_page_cache(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    store = make_store([b"x" * 100], [[plain(0, 10)]])
    assert FileLink(store, "auto").mode == "page_cache"
    assert FileLink(store, "direct").mode == "page_cache"


@pytest.mark.usefixtures("needs_direct")
@pytest.mark.parametrize(
    ("free_bytes", "planned_bytes", "expected"),
    [
        (2 * GIB + 40_000, 0, "page_cache"),
        (2 * GIB + 39_999, 0, "direct"),
        (2 * GIB + 50_000, 10_000, "page_cache"),
        (2 * GIB + 50_000, 10_001, "direct"),
        (GIB, 2 * GIB, "direct"),
        (None, 0, "page_cache"),
    ],
)
def test_auto_takes_the_page_cache_if_the_experts_fit_with_2_gib_to_spare(
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int | None,
    planned_bytes: int,
    expected: str,
) -> None:
    monkeypatch.setattr("promoe.transfer.links.disk.free_ram_bytes", lambda: free_bytes)
    store = make_store([bytes(40_000)], [[plain(0, 40_000)]])
    link = FileLink(store, planned_bytes=planned_bytes)
    assert link.mode == expected
    assert ("O_DIRECT" in link.describe()) == (expected == "direct")
    if free_bytes is not None:
        assert "39.1 KiB" in link.describe()  # what was compared
        assert "free RAM" in link.describe()
    link.close()


def test_describe_tells_mode_largest_chunk_and_readers(mode: Any, make_store: MakeStore) -> None:
    store = make_store([bytes(40_000)], [[plain(0, 1024), plain(1024, 8192), plain(9216, 10)]])
    name = {"page_cache": "page cache", "direct": "O_DIRECT"}[mode]
    link = FileLink(store, mode, workers=3)
    assert link.describe() == f"{name}, chunks up to 8.0 KiB, 3 readers (as asked)"
    assert link.workers == 3
    link.close()
    assert FileLink(store, mode, workers=1).describe() == f"{name}, chunks up to 8.0 KiB, 1 reader (as asked)"


def test_wrong_arguments(make_store: MakeStore) -> None:
    store = make_store([b"x"], [[plain(0, 1)]])
    with pytest.raises(ConfigError, match=r"'mode' .* auto, page_cache, direct. Got 'mmap' instead"):
        FileLink(store, "mmap")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'workers' .* at least 1 thread. Got 0"):
        FileLink(store, workers=0)


def test_the_protocols_fit(link: FileLink) -> None:
    assert isinstance(link, Link)
    assert isinstance(link._store, Store)


def test_a_closed_link_refuses_and_gives_its_files_back(mode: Any, make_store: MakeStore) -> None:
    store = make_store([os.urandom(9_000), os.urandom(9_000)], [[plain(0, 9_000)]])
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    link = FileLink(store, mode)
    link.close()
    link.close()
    slot = Slot(9_000)
    with pytest.raises(OSError, match="closed") as raised:
        link.transfer(plain(0, 9_000), slot.memory, slot.address)
    assert raised.value.errno == errno.EBADF
    assert "own-0-0.bin, offset 0" in str(raised.value)
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before
    store.read(plain(0, 9_000), slot.memory)  # the store is the caller's
    assert bytes(slot.memory) == store.files[0].content


@pytest.mark.usefixtures("needs_direct")
def test_closing_under_a_running_read_cannot_redirect_it_to_another_file(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([os.urandom(50_000)], [[plain(0, 50_000)]])
    link = FileLink(store, "direct")
    (tmp_path / "other").write_bytes(bytes(50_000))
    opened: list[int] = []
    real = os.preadv

    def close_in_between(fd: int, *args: Any) -> int:
        thread = threading.Thread(target=link.close)
        thread.start()
        thread.join()
        opened.extend(os.open(tmp_path / "other", os.O_RDONLY | os.O_DIRECT) for _ in range(20))
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", close_in_between)
    chunk, slot = plain(0, 50_000), Slot(50_000)
    link.transfer(chunk, slot.memory, slot.address)
    monkeypatch.undo()
    for fd in opened:
        os.close(fd)
    assert slot.bytes_of(chunk) == store.expected(chunk)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_drop_files_drops_every_file_after_writing_it_out(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([os.urandom(9_000), os.urandom(5_000)], [[plain(0, 9_000)]])
    calls: list[tuple[str, str]] = []

    def record(name: str) -> Callable[..., None]:
        return lambda fd, *args: calls.append((name + str(args), os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", record("fsync"))
    monkeypatch.setattr(os, "posix_fadvise", record("fadvise"))
    drop_files(file.path for file in store.files)
    paths = [str(file.path) for file in store.files]
    advice = f"fadvise(0, 0, {os.POSIX_FADV_DONTNEED})"
    assert calls == [("fsync()", paths[0]), (advice, paths[0]), ("fsync()", paths[1]), (advice, paths[1])]
    slot = Slot(9_000)
    store.read(plain(0, 9_000), slot.memory)
    assert bytes(slot.memory) == store.files[0].content
