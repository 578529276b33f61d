"""The link from RAM to RAM, as fast as the machine copies."""

from __future__ import annotations

import errno

from promoe.stores.base import Chunk, Store
from promoe.transfer.links.base import Link
from promoe.transfer.links.staging import Staging, read_into_slot


class HostLink(Link):
    """Copies chunks from a store in RAM into slots in RAM.

    Args:
        store: where the experts are; the caller closes it.
        workers: threads that the engine runs. One is enough for a small machine's memory.
    """

    copies_from_ram = True

    def __init__(self, store: Store, workers: int = 1) -> None:
        self.workers = workers
        self._store = store
        self._staging = Staging()
        self._closed = False

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Copy one chunk; see `Link.transfer`."""
        if self._closed:
            raise OSError(errno.EBADF, "The link is closed")
        read_into_slot(self._store, chunk, destination, self._staging)

    def describe(self) -> str:
        """Return one line for reports."""
        return "host memory"

    def close(self) -> None:
        """Refuse further transfers."""
        self._closed = True
