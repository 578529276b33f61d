"""What a file was when it was opened, so that other bytes in it are noticed and not served."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from promoe.stores.safetensors_header import HEADER_LENGTH_BYTES
from promoe.untrusted import MAX_JSON_BYTES, open_plain


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """An open safetensors file: which one it is, how long, when it was last written, and a checksum of its header.

    Comparing takes one `fstat`. It does not notice who writes and then sets the time back, nor writes through a mapping before
    the system has dated them (`verify` of PromoeConfig looks at the bytes).
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    header_crc: int

    @classmethod
    def of(cls, fd: int) -> Fingerprint:
        """That of an open file."""
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, _header_crc(fd))

    def changes(self, fd: int, path: Path) -> str:
        """What differs in an open file, in words: "size 4096 -> 1024 bytes, ..."; "" if nothing does.

        `path` is where it was opened; of a file that changed, the header is read there.
        """
        now = os.fstat(fd)
        if (
            now.st_mtime_ns == self.modified_ns
            and now.st_size == self.size_bytes
            and now.st_ino == self.inode
            and now.st_dev == self.device
        ):
            return ""
        changes = []
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            changes.append("another file in its place")
        if now.st_size != self.size_bytes:
            changes.append(f"size {self.size_bytes} -> {now.st_size} bytes")
        if now.st_mtime_ns != self.modified_ns:
            changes.append(f"modified {_date(self.modified_ns)} -> {_date(now.st_mtime_ns)}")
        return ", ".join([*changes, self._header_now(path)])

    def _header_now(self, path: Path) -> str:
        try:
            fd = open_plain(path)  # not the one at hand, which may be for O_DIRECT
        except OSError as error:
            return f"header: {error.strerror}"
        try:
            return "same header" if _header_crc(fd) == self.header_crc else "another header"
        finally:
            os.close(fd)


def _header_crc(fd: int) -> int:
    prefix = os.pread(fd, HEADER_LENGTH_BYTES, 0)
    header_bytes = min(int.from_bytes(prefix, "little"), MAX_JSON_BYTES)
    return zlib.crc32(os.pread(fd, header_bytes, HEADER_LENGTH_BYTES), zlib.crc32(prefix))


def _date(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}.{rest_ns // 1000:06}"
