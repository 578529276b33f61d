"""What a link is: how one chunk gets from its store into a slot. Knows chunks and addresses; not why, not when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from promoe.stores.base import Chunk


@runtime_checkable
class Link(Protocol):
    """Moves chunks. `transfer` is called by `workers` threads at once, each chunk into a range that no other writes."""

    workers: int
    """How many threads the engine should run: as many as the link needs in flight to be busy."""

    copies_from_ram: bool
    """Whether a short transfer takes less time than it takes to wake another thread for it."""

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        """Bring a chunk into its slot. When it returns, the bytes (converted where the chunk says so) are there; on a device,
        they will be for whoever begins to read the slot by its pool.

        Args:
            chunk: what to move.
            destination: the whole slot as its pool has it, in RAM a writable memoryview; exactly `chunk.nbytes` from
                `chunk.slot_offset_bytes` on are written.
            address: where `destination` starts in memory.

        Raises:
            OSError: the bytes could not be had; the message names source, offset and cause. The range's contents are
                then undefined, the rest of the slot is untouched.
        """
        ...

    def describe(self) -> str:
        """One line for reports: "page cache, 2 readers", "emulated 12.0 GB/s, 20 µs"."""
        ...

    def close(self) -> None:
        """Give back files and buffers; transfers afterwards raise OSError. Closing twice is allowed."""
        ...


@runtime_checkable
class QueueingLink(Protocol):
    """A link whose transfers may cost the host no more than a word to a device's copy engine."""

    queues: bool
    """Whether they do: who needs experts then has them copied himself, instead of waking a thread for it."""

    def transfer_all(self, transfers: Sequence[tuple[Chunk, Any]]) -> None:
        """`transfer` several chunks, each with its destination, behind what is in the queue already.

        Raises:
            OSError: none of them counts as transferred.
        """
        ...
