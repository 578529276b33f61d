"""RAM to RAM, as fast as the machine copies: for experts in host memory without a slower tier to speak of."""

from __future__ import annotations

import errno

from promoe.stores.base import Chunk, Store
from promoe.transfer.links.staging import Staging, read_into_slot


class HostLink:
    """Copies chunks from a store in RAM into slots in RAM, without any limit.

    Args:
        store: where the experts are; it stays the caller's to close.
        workers: threads that the engine should run. One already saturates a small machine's memory.
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
        """One line for reports."""
        return "host memory"

    def close(self) -> None:
        """Refuse further transfers."""
        self._closed = True
