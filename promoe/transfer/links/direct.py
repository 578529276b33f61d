"""Reads past the page cache (O_DIRECT): any range of a file to any address, on a device that only knows whole blocks.

The kernel requires file offset and length to be multiples of a block, and addresses to be aligned. Where they allow it,
whole blocks go straight to their place, and only the two partial blocks at the ends pass through a buffer. Otherwise
the whole range is staged and copied.

Since version 6.1, Linux says for each file what it requires, and that is often far less than a page. An NVMe disk
typically wants offsets in multiples of 512 and addresses in multiples of 4. Every tensor of a safetensors file meets
that, so every chunk can go straight into its slot.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from promoe.stores.open_files import OPEN_FILES, Descriptor, KeptFile, reopened
from promoe.transfer.links.staging import Staging
from promoe.transfer.memory import HugePageRegion

PAGE_BYTES = 4096
REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
STATX_BYTES = 256
DIO_FIELDS_OFFSET = 152  # of stx_dio_mem_align, followed by stx_dio_offset_align, in struct statx


class DirectUnsupportedError(OSError):
    """The file system (or the operating system) of a file has no O_DIRECT."""


class Alignment(NamedTuple):
    """What O_DIRECT requires: offsets and lengths in multiples of `offset_bytes`, addresses of `memory_bytes`.

    Both are powers of two.
    """

    offset_bytes: int
    memory_bytes: int


WHOLE_PAGES = Alignment(PAGE_BYTES, PAGE_BYTES)
"""Enough for file systems on common hardware that do not say what they require."""


def direct_alignment(fd: int) -> Alignment:
    """Return what the file system requires for an open file, or whole pages where it says nothing that could be used."""
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


class DirectDescriptor(Descriptor):
    """A file that is open with O_DIRECT.

    Args:
        path: the file.
        flags: how to open it.
        alignment: what its file system requires.
    """

    def __init__(self, path: Path, flags: int, alignment: Alignment = WHOLE_PAGES) -> None:
        super().__init__(path, os.open(path, flags | getattr(os, "O_CLOEXEC", 0)))
        self.alignment = alignment


class DirectFiles:
    """Files that are opened with O_DIRECT, and reads of arbitrary ranges of them. Thread-safe.

    Args:
        paths: `file_idx` -> the file.
        keep_open: those that stay open until they are closed, because their names may go.
        check: called with `file_idx` and descriptor of a file whenever it is opened; raises OSError if it is another file.

    Raises:
        DirectUnsupportedError: one of them is on a file system without O_DIRECT (tmpfs of older kernels, some network
            and stacked file systems, macOS).
        OSError: one of them cannot be opened or read, or see `check`.
    """

    def __init__(
        self,
        paths: Mapping[int, Path],
        keep_open: Collection[int] = (),
        check: Callable[[int, int], None] = lambda file_idx, fd: None,
    ) -> None:
        self._check = check
        self._staging = Staging()
        self._paths = {idx: Path(os.path.abspath(path)) for idx, path in paths.items()}
        self._alignments: dict[int, Alignment] = {}
        self._files: dict[int, KeptFile[DirectDescriptor]] = {}
        for idx in paths:
            first = OPEN_FILES.opened(partial(self._open, idx))
            check(idx, first.fd)
            self._alignments[idx] = first.alignment
            self._files[idx] = KeptFile(first, idx in keep_open)

    def descriptor(self, file_idx: int) -> DirectDescriptor:
        """Return an open file, which stays open for as long as the caller holds it.

        Raises:
            OSError: the files are closed, the file cannot be opened again, or another has taken its name.
        """
        return self._files[file_idx].descriptor(partial(self._reopen, file_idx))

    def read(self, descriptor: DirectDescriptor, offset_bytes: int, target: memoryview, address: int) -> None:
        """Fill `target`, which is at `address`, from `offset_bytes` of a file on.

        Raises:
            OSError: the device fails, or the file ends early. The message names path, offset and bytes.
        """
        nbytes = len(target)
        block_bytes, memory_bytes = descriptor.alignment
        head_bytes = min(-offset_bytes % block_bytes, nbytes)
        middle_bytes = (nbytes - head_bytes) // block_bytes * block_bytes
        if (address + head_bytes) % memory_bytes or middle_bytes == 0:
            region, start = self.stage(descriptor, offset_bytes, nbytes)
            # ctypes, not a memoryview assignment: it lets other threads run during a copy of megabytes.
            ctypes.memmove(address, region.address + start, nbytes)
            return
        tail_start = head_bytes + middle_bytes
        tail_bytes = nbytes - tail_start
        ends = self._staging.region(2 * PAGE_BYTES).memory
        head, tail = ends[:block_bytes], ends[PAGE_BYTES : PAGE_BYTES + block_bytes]
        buffers = [target[head_bytes:tail_start]]
        if head_bytes:
            buffers.insert(0, head)
        if tail_bytes:
            buffers.append(tail)
        _read_blocks(descriptor, offset_bytes, nbytes, buffers)
        if head_bytes:
            target[:head_bytes] = head[block_bytes - head_bytes :]
        if tail_bytes:
            target[tail_start:] = tail[:tail_bytes]

    def stage(self, descriptor: DirectDescriptor, offset_bytes: int, nbytes: int) -> tuple[HugePageRegion, int]:
        """Read a range into the calling thread's buffer.

        Returns:
            The buffer, valid until the thread's next read, and the offset in it at which the range starts.

        Raises:
            OSError: see `read`.
        """
        block_bytes = descriptor.alignment.offset_bytes
        start = offset_bytes % block_bytes
        staged_bytes = -(-(start + nbytes) // block_bytes) * block_bytes
        region = self._staging.region(staged_bytes)
        _read_blocks(descriptor, offset_bytes, nbytes, [region.memory[:staged_bytes]])
        return region, start

    def close(self) -> None:
        """Close the files as soon as the reads in flight have ended. Closing twice is allowed."""
        for file in self._files.values():
            file.close()

    def _reopen(self, file_idx: int) -> DirectDescriptor:
        path = self._paths[file_idx]
        flags, alignment = os.O_RDONLY | os.O_DIRECT, self._alignments[file_idx]
        descriptor = reopened(path, lambda: DirectDescriptor(path, flags, alignment))
        try:
            self._check(file_idx, descriptor.fd)
            return descriptor
        finally:
            del descriptor  # otherwise the traceback of an error would keep the file open

    def _open(self, file_idx: int) -> DirectDescriptor:
        path = self._paths[file_idx]
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            raise DirectUnsupportedError(errno.ENOTSUP, "This operating system has no O_DIRECT", str(path))
        try:
            descriptor = DirectDescriptor(path, os.O_RDONLY | flag)
            self._try_read(descriptor, WHOLE_PAGES)  # some file systems accept the flag and refuse the read
        except OSError as error:
            if error.errno in REFUSALS:
                raise DirectUnsupportedError(error.errno, "The file system has no O_DIRECT", str(path)) from error
            raise
        finer = direct_alignment(descriptor.fd)
        try:
            self._try_read(descriptor, finer)
            descriptor.alignment = finer
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
        return descriptor

    def _try_read(self, descriptor: DirectDescriptor, alignment: Alignment) -> None:
        """Read one block to an address that is aligned no better than required."""
        offset_bytes, memory_bytes = alignment
        memory = self._staging.region(2 * PAGE_BYTES).memory
        os.preadv(descriptor.fd, [memory[memory_bytes : memory_bytes + offset_bytes]], offset_bytes)


def _read_blocks(descriptor: DirectDescriptor, offset_bytes: int, nbytes: int, buffers: list[memoryview]) -> None:
    """Read the blocks around a range with one `preadv`, or more only if the kernel stops half way."""
    block_bytes = descriptor.alignment.offset_bytes
    lead_bytes = offset_bytes % block_bytes
    done_bytes = 0
    while True:
        try:
            count = os.preadv(descriptor.fd, buffers, offset_bytes - lead_bytes + done_bytes)
        except OSError as error:
            found_bytes = max(0, done_bytes - lead_bytes)
            what = f"Cannot read {nbytes} bytes at offset {offset_bytes} ({found_bytes} found): {error.strerror}"
            raise OSError(error.errno, what, str(descriptor.path)) from error
        done_bytes += count
        if done_bytes >= lead_bytes + nbytes:
            return
        if count == 0 or count % block_bytes:  # a partial block is the file's last
            found_bytes = max(0, done_bytes - lead_bytes)
            what = f"File ends early: expected {nbytes} bytes at offset {offset_bytes}, found {found_bytes}"
            raise OSError(errno.EIO, what, str(descriptor.path))
        buffers = _skip(buffers, count)


def _skip(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of the buffers after their first `nbytes`."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if nbytes < len(buffer):
            rest.append(buffer[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return rest
