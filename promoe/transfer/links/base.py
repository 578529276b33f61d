"""What a link is: it moves one chunk of an expert from its store into a slot. Links know nothing of experts' use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from promoe.stores.base import Chunk


@runtime_checkable
class Link(Protocol):
    """Moves chunks into slots. Threads call it at once, each for a range of a slot that no other thread writes.

    A link derives from this class and says in these attributes what it can do besides moving chunks.
    """

    workers: int
    """How many threads the engine runs for it: as many as the link needs in flight to be busy."""

    copies_from_ram: bool = False
    """Whether a short transfer takes less time than waking another thread for it. Forwards then make it themselves."""

    queues: bool = False
    """Whether `transfer_all` only queues copies for a device. Forwards then queue what they need themselves."""

    mode: Literal["page_cache", "direct"] | None = None
    """How it reads files; None if it reads none."""

    emulated_bytes_per_s: float | None = None
    """The bandwidth that it emulates, in bytes per second; None if it is as fast as the machine."""

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        """Bring a chunk into its slot.

        When this returns, the bytes are in a slot in RAM, converted where the chunk says so. A slot on a device is read
        through its pool, which waits for them.

        Args:
            chunk: what to move.
            destination: the whole slot as its pool has it, in RAM a writable memoryview. Exactly `chunk.nbytes` are
                written, from `chunk.slot_offset_bytes` on.
            address: where `destination` starts in memory.

        Raises:
            OSError: the bytes could not be read; the message names source, offset and cause. The contents of the range
                are then undefined, and the rest of the slot is untouched.
        """
        ...

    def transfer_all(self, transfers: Sequence[tuple[Chunk, Any]]) -> None:
        """Queue the copies of several chunks, each with its slot, behind what is queued already. Only if it `queues`.

        Raises:
            OSError: none of them counts as transferred.
        """
        raise AssertionError(f"{self.describe()} does not queue")

    def describe(self) -> str:
        """Return one line for reports, such as "page cache, 2 readers" or "emulated 12.0 GB/s, 20 µs"."""
        ...

    def close(self) -> None:
        """Give back files and buffers. Later transfers raise OSError. Closing twice is allowed."""
        ...


class LinkWrapper(Link):
    """A link that has another link move the chunks, and can do what that one can. Subclasses add to `transfer`.

    Args:
        link: moves the chunks; closed with this link.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.workers = link.workers
        self.copies_from_ram = link.copies_from_ram
        self.queues = link.queues
        self.mode = link.mode
        self.emulated_bytes_per_s = link.emulated_bytes_per_s

    def transfer_all(self, transfers: Sequence[tuple[Chunk, Any]]) -> None:
        """Queue copies by the other link; see `Link.transfer_all`."""
        self.link.transfer_all(transfers)

    def describe(self) -> str:
        """Return the other link's description."""
        return self.link.describe()

    def close(self) -> None:
        """Close the other link."""
        self.link.close()
