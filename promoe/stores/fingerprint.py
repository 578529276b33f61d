"""Notices when a file has changed since it was opened, so that its new bytes are not served."""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from promoe.files import MAX_JSON_BYTES, open_plain
from promoe.stores.gguf_header import MAGIC
from promoe.stores.safetensors_header import HEADER_LENGTH_BYTES

logger = logging.getLogger(__name__)

# The blocks that are compared if only a file's time has changed: the first, the last, and others evenly between them.
SAMPLES, SAMPLE_BYTES = 16, 4096
# What counts as the header of a GGUF file, whose own length is known only to who reads all of it.
GGUF_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of an open file of tensors: device, inode, size, time, and checksums of its header and of samples.

    A comparison takes one `fstat`. If only the time has changed (by a backup, a sync, `touch`), header and samples decide:
    64 KiB of the file, or all of a smaller one. Three things are not noticed: writes to other places only, a time that is
    set back, and writes through a mapping before the system has dated them (`verify` of PromoeConfig checks all bytes).
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    header_crc: int
    samples_crc: int

    @classmethod
    def of(cls, fd: int) -> Fingerprint:
        """Return the fingerprint of an open file."""
        status = os.fstat(fd)  # first: a write from now on gives the file a later time than this
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            _header_crc(fd),
            _samples_crc(fd, status.st_size),
        )

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether these are the file, the size and the time of the fingerprint."""
        return self._same_file(status) and status.st_mtime_ns == self.modified_ns

    def look_again(self, fd: int, own_fd: int, path: Path) -> tuple[Fingerprint, str]:
        """Compare an open file with this fingerprint.

        Args:
            fd: the file, open for reading; may have O_DIRECT.
            own_fd: the file that the fingerprint was taken from, open without O_DIRECT: its bytes are compared.
            path: the file's path, where a file that has replaced it is read.

        Returns:
            The fingerprint to compare with from now on, and the differences in words ("size 4096 -> 1024 bytes, ..."), or ""
            if there are none.
        """
        now = os.fstat(fd)
        if self.is_of(now):
            return self, ""
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            return self, self._differences(now, self._at(path))
        header, samples = _header_crc(own_fd), _samples_crc(own_fd, now.st_size)
        if self._same_file(now) and (header, samples) == (self.header_crc, self.samples_crc):
            logger.info("%s has a new date; its size, its header and samples of its bytes are as before.", path)
            return replace(self, modified_ns=now.st_mtime_ns), ""
        same = "same header" if header == self.header_crc else "another header"
        return self, self._differences(now, same if samples == self.samples_crc else f"{same}, other bytes")

    def _same_file(self, status: os.stat_result) -> bool:
        expected = (self.size_bytes, self.inode, self.device)
        return (status.st_size, status.st_ino, status.st_dev) == expected

    def _at(self, path: Path) -> str:
        try:
            fd = open_plain(path)  # not `fd`, which may have O_DIRECT
        except OSError as error:
            return f"header: {error.strerror}"
        try:
            return "same header" if _header_crc(fd) == self.header_crc else "another header"
        finally:
            os.close(fd)

    def _differences(self, now: os.stat_result, content: str) -> str:
        changes = []
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            changes.append("another file in its place")
        if now.st_size != self.size_bytes:
            changes.append(f"size {self.size_bytes} -> {now.st_size} bytes")
        if now.st_mtime_ns != self.modified_ns:
            changes.append(f"modified {_date(self.modified_ns)} -> {_date(now.st_mtime_ns)}")
        return ", ".join([*changes, content])


def _header_crc(fd: int) -> int:
    prefix = os.pread(fd, HEADER_LENGTH_BYTES, 0)
    is_gguf = prefix.startswith(MAGIC)
    header_bytes = GGUF_HEADER_BYTES if is_gguf else min(int.from_bytes(prefix, "little"), MAX_JSON_BYTES)
    return zlib.crc32(os.pread(fd, header_bytes, HEADER_LENGTH_BYTES), zlib.crc32(prefix))


def _samples_crc(fd: int, size_bytes: int) -> int:
    """Return a checksum of `SAMPLES` blocks, or of the whole file if it is not larger."""
    if size_bytes <= SAMPLES * SAMPLE_BYTES:
        return zlib.crc32(os.pread(fd, size_bytes, 0))
    crc = 0
    for idx in range(SAMPLES):
        crc = zlib.crc32(os.pread(fd, SAMPLE_BYTES, (size_bytes - SAMPLE_BYTES) * idx // (SAMPLES - 1)), crc)
    return crc


def _date(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}.{rest_ns // 1000:06}"
