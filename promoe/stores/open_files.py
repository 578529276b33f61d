"""Keeps files open for reading. If they are more than the process may have open, the ones used last stay open.

The others are closed, and opened again when they are read. It knows descriptors, not what is in the files.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

# What the soft limit is raised to, where the hard one allows it. macOS takes no more than 10240 (OPEN_MAX), and some programs
# get slow with millions.
RAISED_LIMIT = 4096

T = TypeVar("T")
D = TypeVar("D", bound="Descriptor")
_numbers = itertools.count()


class Descriptor:
    """An open file that closes when nobody holds it any more.

    If its number were closed under a running read, another file could be opened under that number, and the read would
    find that one: a wrong weight without an error. So readers hold the object, and the number lives as long as they do.
    """

    fd = -1

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:  # otherwise it could not be opened
            os.close(self.fd)


class OpenFiles:
    """Descriptors that are kept for the next read, the least recently used first. Thread-safe.

    Args:
        limit: most descriptors that are kept, at least 1; None: half of what the process may have open. Reads in flight
            hold theirs beside these.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Descriptor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def opened(self, open_one: Callable[[], T]) -> T:
        """Return what `open_one` returns. While the process has too many files open, make room and call it again.

        Raises:
            OSError: as `open_one`.
        """
        while True:
            try:
                return open_one()
            except OSError as error:
                if error.errno != errno.EMFILE or not (raise_limit() or self._close_oldest()):
                    raise

    def find(self, number: int) -> Descriptor | None:
        """Return the descriptor kept under a number, which is now the most recently used, or None."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
            return self._kept.get(number)

    def keep(self, number: int, descriptor: Descriptor) -> None:
        """Keep a descriptor under a number, and close those used least recently if there are too many."""
        with self._lock:
            self._kept[number] = descriptor
            self._kept.move_to_end(number)
            excess = len(self._kept) - self._most(len(self._kept))
        for _ in range(excess):
            self._close_oldest()

    def forget(self, number: int) -> None:
        """Stop keeping a descriptor. It closes with the last read of it."""
        # No lock: the garbage collector may call this from within any of the methods above.
        self._kept.pop(number, None)

    def _close_oldest(self) -> bool:
        """Stop keeping the least recently used descriptor. Return False if none is kept."""
        try:
            self._kept.popitem(last=False)
        except KeyError:
            return False
        return True

    def _most(self, count: int) -> int:
        """Return how many descriptors may be kept, if there are `count`."""
        if self._limit is not None:
            return self._limit
        if count > soft_limit() // 2:
            raise_limit()
        return max(1, soft_limit() // 2)


OPEN_FILES = OpenFiles()
"""Those of this process. The system counts a process's files, so all stores and links share them."""


class KeptFile(Generic[D]):
    """A file that is open at first, and from then on when it is read or was read recently.

    Args:
        first: the file, open.
        keep_open: whether it stays open until `close`, because nobody could open it again.
        among: the open files that it is one of.
    """

    def __init__(self, first: D, keep_open: bool = False, among: OpenFiles = OPEN_FILES) -> None:
        self.closed = False
        self._own = first if keep_open else None
        self._among = among
        self._number = next(_numbers)
        # If Ctrl-C interrupts opening, nobody calls close().
        finalizer = weakref.finalize(self, among.forget, self._number)
        finalizer.atexit = False
        if not keep_open:
            among.keep(self._number, first)

    def descriptor(self, reopen: Callable[[], D]) -> D:
        """Return the open file. The caller holds it while it reads. Thread-safe.

        Args:
            reopen: Opens the file again, and raises OSError if it is not the same file.

        Raises:
            OSError: it is closed, or see `reopen`.
        """
        # No lock is held while a file is opened, which may take long on a network. If two threads open the same one, the
        # first descriptor closes after its read.
        descriptor = self._own or self._among.find(self._number)
        if descriptor is None and not self.closed:
            descriptor = self._among.opened(reopen)
            self._among.keep(self._number, descriptor)
        if self.closed:  # also if that was meanwhile
            self._among.forget(self._number)
            raise OSError(errno.EBADF, "The file is closed")
        return descriptor  # type: ignore[return-value]  # what was kept under this number came from `reopen` or is `first`

    def close(self) -> None:
        """Close the file once the reads in flight have ended. Closing twice is allowed."""
        self.closed = True
        self._own = None
        self._among.forget(self._number)


def reopened(path: Path, open_one: Callable[[], T]) -> T:
    """Return what `open_one` returns: a file that was open before.

    Raises:
        OSError: as `open_one`, with a remedy in its message.
    """
    try:
        return open_one()
    except OSError as error:
        what = f"Cannot open the file again: {error.strerror}. "
        if error.errno == errno.EMFILE:
            what += f"This process may have {soft_limit()} files open: raise the limit (ulimit -n)"
        else:
            what += "Put it back as it was, or open the model again"
        raise OSError(error.errno, what, str(path)) from error


def soft_limit() -> int:
    """Return how many files this process may have open; without a limit, what one would be raised to."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RAISED_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> bool:
    """Raise the limit of open files to `RAISED_LIMIT`, or as far as the system allows. Return False if it cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = RAISED_LIMIT if hard == resource.RLIM_INFINITY else min(hard, RAISED_LIMIT)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        logger.info("The limit of open files stays at %d: %s", soft, error)
        return False
    logger.info("This process may now have %d files open. Its limit was %d (ulimit -n).", target, soft)
    return True
