"""A check of what a link brought: the bytes in the slot against those in the store, or those that came first."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Hashable

from promoe.config import Verify
from promoe.stores.base import Chunk, Store, convert_chunk
from promoe.transfer.links.base import Link, LinkWrapper


class VerifiedLink(LinkWrapper):
    """A link into RAM that compares the CRC-32 of what another link brought.

    When a chunk comes for the first time, the store itself reads it again into other memory and converts it there: both
    must agree. With "always", later arrivals must agree with the first one, too. A transfer that does not agree is an
    error; nothing is remembered of it, and the next one is compared again.

    Two reads of the same page of the system's cache agree also on what went wrong before the page got there.

    Args:
        link: moves the bytes.
        store: where the chunks come from.
        mode: "first" or "always".
    """

    def __init__(self, link: Link, store: Store, mode: Verify) -> None:
        super().__init__(link)
        self._store = store
        self._verify = mode
        self._known: dict[Hashable, int] = {}

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Move one chunk and compare it; see `Link.transfer`.

        Raises:
            OSError: the transfer failed, or the bytes differ; the message names both checksums.
        """
        self.link.transfer(chunk, destination, address)
        known = self._known.get(chunk.name)
        if known is not None and self._verify == "first":
            return
        found = zlib.crc32(destination[chunk.slot_offset_bytes : chunk.slot_offset_bytes + chunk.nbytes])
        expected = zlib.crc32(self._read_again(chunk)) if known is None else known
        if found != expected:
            before = "a second read of them" if known is None else "those that came first"
            raise OSError(
                errno.EIO,
                f"The {chunk.nbytes} bytes that came differ from {before} (CRC-32 {found:08x}, expected {expected:08x}); "
                "they were not used. Check disk and memory, and that nothing writes to the checkpoint or the model",
            )
        self._known[chunk.name] = expected

    def describe(self) -> str:
        """Return one line for reports."""
        return f"{self.link.describe()}, verified ({self._verify})"

    def _read_again(self, chunk: Chunk) -> memoryview:
        """Return the chunk's final bytes, read and converted by the store."""
        source = memoryview(bytearray(chunk.source_nbytes))
        self._store.read(chunk, source)
        if chunk.dtype is None:
            return source
        converted = memoryview(bytearray(chunk.nbytes))
        convert_chunk(chunk, source, converted)
        return converted
