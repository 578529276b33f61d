"""The link from disk to RAM: chunks are read from a store's files into slots, through the page cache or past it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from promoe.errors import ConfigError
from promoe.stores.base import Chunk, Store, longest_chunk
from promoe.stores.layout import PAGE_ALIGNED_FROM_BYTES
from promoe.transfer.links.base import Link
from promoe.transfer.links.direct import DirectFiles, DirectUnsupportedError
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.staging import Staging, convert_into_slot, read_into_slot
from promoe.units import format_memory

logger = logging.getLogger(__name__)

FileMode = Literal["auto", "page_cache", "direct"]
SPARE_RAM_BYTES = 2 * 1024**3


class FileLink(Link):
    """Reads chunks of a file store with blocking reads, from `workers` threads at once.

    Args:
        store: where the experts are; the caller closes it, after the link.
        mode: "page_cache" reads through the system's cache, which keeps what it read in idle RAM. "direct" reads past
            it (O_DIRECT), straight into the slot where addresses allow. "auto" takes the page cache if all experts fit
            into free RAM with 2 GiB to spare. Where the file system has no O_DIRECT, "direct" becomes "page_cache",
            with a logged warning.
        workers: threads that the engine runs.
        planned_bytes: RAM that is planned for but not in use yet (slots fill later), subtracted from the free RAM. It
            is negative if more RAM will be freed than used.

    Raises:
        ConfigError: the mode is unknown, or there is no worker.
        OSError: a file cannot be opened, or is not the one that the store opened.
    """

    def __init__(self, store: Store, mode: FileMode = "auto", workers: int = 2, *, planned_bytes: int = 0) -> None:
        if mode not in get_args(FileMode):
            raise ConfigError(
                f"The 'mode' of a file link must be one of {', '.join(get_args(FileMode))}. Got {mode!r} instead."
            )
        if workers < 1:
            raise ConfigError(f"The 'workers' of a file link must be at least 1 thread. Got {workers} instead.")
        self.workers = workers
        self._store = store
        self._staging = Staging()
        self._closed = False
        self._direct: DirectFiles | None = None
        free_bytes = free_ram_bytes()
        self.mode: Literal["page_cache", "direct"]
        self.mode, self._why = choose_mode(
            mode, store.expert_bytes, None if free_bytes is None else free_bytes - planned_bytes
        )
        if self.mode == "direct":
            try:
                files = {i: file for i, file in enumerate(store.files) if not file.closed}
                self._direct = DirectFiles(
                    {i: file.path for i, file in files.items()},
                    [i for i, file in files.items() if file.keep_open],
                    lambda file_idx, fd: files[file_idx].check_unchanged(fd),
                )
            except DirectUnsupportedError as error:
                self.mode, self._why = "page_cache", f"no O_DIRECT: {error.strerror}"
                logger.warning("Reading experts through the page cache: %s (%s)", error.strerror, error.filename)
        self.copies_from_ram = self.mode == "page_cache"

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        """Read one chunk into its slot; see `Link.transfer`."""
        if self._closed:
            raise OSError(errno.EBADF, f"Cannot read {self._store.describe(chunk)}: the link is closed")
        direct = self._direct
        if direct is None or (chunk.parts and not _is_long(chunk)):
            read_into_slot(self._store, chunk, destination, self._staging)
            return
        if chunk.parts:
            self._read_parts(direct, chunk)
            convert_into_slot(chunk, self._staging.region(chunk.source_nbytes), 0, destination)
            return
        descriptor = direct.descriptor(chunk.source_idx)
        if chunk.dtype is None:
            start, end = chunk.slot_offset_bytes, chunk.slot_offset_bytes + chunk.nbytes
            direct.read(descriptor, chunk.source_offset_bytes, destination[start:end], address + start)
        else:
            region, start = direct.stage(descriptor, chunk.source_offset_bytes, chunk.source_nbytes)
            convert_into_slot(chunk, region, start, destination)
        self._store.files[chunk.source_idx].check_unchanged(descriptor.fd)

    def _read_parts(self, direct: DirectFiles, chunk: Chunk) -> None:
        """Read all parts of a chunk into the calling thread's buffer."""
        region = self._staging.region(chunk.source_nbytes)
        for part in chunk.parts:
            start, end = part.offset_bytes, part.offset_bytes + part.nbytes
            descriptor = direct.descriptor(part.source_idx)
            direct.read(descriptor, part.source_offset_bytes, region.memory[start:end], region.address + start)
            self._store.files[part.source_idx].check_unchanged(descriptor.fd)

    def describe(self) -> str:
        """Return one line for reports, such as "O_DIRECT, chunks up to 4.0 MiB, 2 readers (why)"."""
        name = "O_DIRECT" if self.mode == "direct" else "page cache"
        largest_bytes = longest_chunk(self._store)
        readers = "1 reader" if self.workers == 1 else f"{self.workers} readers"
        return f"{name}, chunks up to {format_memory(largest_bytes)}, {readers} ({self._why})"

    def close(self) -> None:
        """Close the link's own files once the reads in flight have ended. The store stays open. Closing twice is allowed."""
        self._closed = True
        if self._direct is not None:
            self._direct.close()


def _is_long(chunk: Chunk) -> bool:
    """Return whether a part of the chunk is long enough to be worth reading whole blocks."""
    return max(part.nbytes for part in chunk.parts) >= PAGE_ALIGNED_FROM_BYTES


def drop_files(paths: Iterable[Path]) -> None:
    """Drop files from the system's page cache, so that the next buffered read comes from the device.

    Pages that some process has mapped stay. This does nothing where the system has no such call (macOS).

    Raises:
        OSError: a file cannot be opened.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that were never written out cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def choose_mode(
    mode: FileMode, expert_bytes: int, free_bytes: int | None
) -> tuple[Literal["page_cache", "direct"], str]:
    """Return how to read files, and why.

    Args:
        mode: as asked for.
        expert_bytes: of all experts.
        free_bytes: RAM that slots and all else leave free; None if unknown.
    """
    if mode != "auto":
        return mode, "as asked"
    if free_bytes is None or not hasattr(os, "O_DIRECT"):
        return "page_cache", "the only way here"
    usable_bytes = max(0, free_bytes)
    experts, usable = format_memory(expert_bytes), format_memory(usable_bytes)
    if expert_bytes + SPARE_RAM_BYTES <= usable_bytes:
        return "page_cache", f"experts of {experts} fit into {usable} of free RAM"
    return "direct", f"experts of {experts} and {format_memory(SPARE_RAM_BYTES)} to spare exceed {usable} of free RAM"
