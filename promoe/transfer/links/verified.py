"""Bytes that a link brought, compared with what the store has, or had when they first came."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Hashable

from promoe.config import Verify
from promoe.stores.base import Chunk, Store, convert_chunk
from promoe.transfer.links.base import Link


class VerifiedLink:
    """Moves chunks by another link and compares their CRC-32 in the slot.

    When a chunk comes for the first time, it is read once more, by the store itself, into other memory, and converted there:
    both must agree. With "always", what comes later must agree with that, too. A transfer that does not is an error, nothing
    is remembered of it, and the next one is compared again.

    Where both reads find the same pages in the system's cache, they agree on what went wrong before it got there.

    Args:
        link: moves the bytes; closed with this link.
        store: whose chunks they are.
        mode: "first" or "always".
    """

    def __init__(self, link: Link, store: Store, mode: Verify) -> None:
        self.workers = link.workers
        self.copies_from_ram = link.copies_from_ram
        self.link = link
        self._store = store
        self._mode = mode
        self._known: dict[Hashable, int] = {}

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Move one chunk and compare it; see `Link.transfer`.

        Raises:
            OSError: as the link's; or the bytes are others, which the message says with both checksums.
        """
        self.link.transfer(chunk, destination, address)
        known = self._known.get(chunk.name)
        if known is not None and self._mode == "first":
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
        """One line for reports."""
        return f"{self.link.describe()}, verified ({self._mode})"

    def close(self) -> None:
        """Close the link."""
        self.link.close()

    def _read_again(self, chunk: Chunk) -> memoryview:
        source = memoryview(bytearray(chunk.source_nbytes))
        self._store.read(chunk, source)
        if chunk.dtype is None:
            return source
        converted = memoryview(bytearray(chunk.nbytes))
        convert_chunk(chunk, source, converted)
        return converted
