"""What a command shows while it works: a bar while weights are loaded, text as it comes, one status line below it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

# A terminal's own words: make sure that a line lies below and come back; save and restore the cursor; erase below it.
_LINE_BELOW, _SAVE, _RESTORE, _ERASE_BELOW = "\033D\033M", "\0337", "\0338", "\033[J"
_DOWN_AND_ERASE, _DIM, _PLAIN = "\033[B\r\033[K", "\033[2m", "\033[m"
_STATUS_EVERY_S = 0.1


class LiveText:
    """Text to one stream as it comes, and, where `err` is a terminal, a status line that follows it.

    Args:
        out: where the text goes; nothing else is written there.
        err: where the status line goes, if it is a terminal.
        clock: seconds, for tests.
    """

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._live = err.isatty() and os.environ.get("TERM") != "dumb"
        # On one terminal the status stands below the text, which must not be written over.
        self._below = self._live and out.isatty()
        self._status = ""
        self._drawn_s = -1.0
        self._at_line_start = True

    def text(self, text: str) -> None:
        """Append to the text."""
        if not text:
            return
        self.erase()
        self._out.write(text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")
        if self._below:
            self._draw()

    def status(self, make: Callable[[], str]) -> None:
        """Replace the status line, at most ten times a second; `make` is called only when it will be shown."""
        if not self._live or 0 <= self._clock() - self._drawn_s < _STATUS_EVERY_S:
            return
        self._status = make()
        self.erase()
        self._draw()
        self._drawn_s = self._clock()

    def erase(self) -> None:
        """Take the status line away, for example before something else is printed."""
        if self._live:
            self._err.write(_ERASE_BELOW if self._below else "\r\033[K")
            self._err.flush()

    def end(self) -> None:
        """The text is complete: end its line."""
        self.erase()
        if not self._at_line_start:
            self._out.write("\n")
            self._out.flush()
        self._at_line_start = True

    def _draw(self) -> None:
        if not self._status:
            return
        line = self._status[: _columns() - 1]
        if self._below:
            self._err.write(f"{_LINE_BELOW}{_SAVE}{_DOWN_AND_ERASE}{_DIM}{line}{_PLAIN}{_RESTORE}")
        else:
            self._err.write(f"\r\033[K{line}")
        self._err.flush()


@contextmanager
def opening_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar in bytes on stderr (where that is a terminal); yields `progress(done_bytes, total_bytes)`.

    A call with another total begins anew: first everything but the experts is read, then, if they fit, the experts.
    """
    with tqdm(desc=f"Opening {name}", unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            if bar.total != total_bytes:
                bar.reset(total_bytes)
            bar.update(done_bytes - bar.n)

        yield progress


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 80
