"""Shows how a command gets on: a bar while weights are loaded, text as it comes, a status below it."""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from tqdm import tqdm

# Control codes of terminals: make sure that there is a line below, and come back; save and restore the cursor; erase below.
_DOWN, _BACK_UP, _SAVE, _RESTORE, _ERASE_BELOW = "\033D", "\033M", "\0337", "\0338", "\033[J"
_NEXT_LINE_AND_ERASE, _DIM, _PLAIN, _ESCAPE = "\033[B\r\033[K", "\033[2m", "\033[m", "\033"
_STATUS_EVERY_S = 0.1
LOG_COLUMNS = 200


class LiveText:
    """Writes text to one stream as it comes, and, if `err` is a terminal, a status of one or more lines below it.

    Args:
        out: for the text; nothing else is written there.
        err: for the status, if it is a terminal.
        clock: returns seconds; for tests.
        log_every_s: if `err` is not a terminal, the status is written there as a line at most this often; None: never.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        clock: Callable[[], float] = time.monotonic,
        log_every_s: float | None = None,
    ) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._live = err.isatty() and os.environ.get("TERM") != "dumb"
        # If both are one terminal, the status is below the text, and must not overwrite it.
        self._below = self._live and out.isatty()
        self._every_s = _STATUS_EVERY_S if self._live else log_every_s
        self._status = ""
        self._drawn_s = -1.0
        self._column = 0
        self._shown = False

    @property
    def room(self) -> tuple[int, int]:
        """Columns and lines that a status may take: a third of a terminal, or one line of a log."""
        columns, lines = _size()
        return (columns - 1, max(1, lines // 3)) if self._live else (LOG_COLUMNS, 1)

    def text(self, text: str) -> None:
        """Append to the text."""
        if not text:
            return
        self.erase()
        self._out.write(text)
        self._out.flush()
        self._column = column_after(text, self._column, _size()[0])
        if self._below:
            self._draw()

    def status(self, make: Callable[[], str]) -> None:
        """Replace the status, at most ten times a second; `make` is called only when it will be shown.

        Lines with control codes must not be longer than `room`; others are cut to that.
        """
        if self._every_s is None or 0 <= self._clock() - self._drawn_s < self._every_s:
            return
        self._status = make()
        if self._live:
            self.erase()
            self._draw()
        else:
            self._err.write(f"{self._status}\n")
            self._err.flush()
        self._drawn_s = self._clock()

    def erase(self) -> None:
        """Remove the status, for example before something else is printed."""
        if self._shown:
            self._err.write(_ERASE_BELOW if self._below else f"\r{_ERASE_BELOW}")
            self._err.flush()
        self._shown = False

    def end(self) -> None:
        """End the line of the text, which is complete."""
        self.erase()
        if self._column:
            self._out.write("\n")
            self._out.flush()
        self._column = 0

    def _draw(self) -> None:
        columns, _ = _size()
        if not self._status or (self._below and self._column == columns):
            # After a full line the cursor is beyond the last column. No terminal can restore that position.
            return
        self._shown = True
        lines = [line if _ESCAPE in line else line[: columns - 1] for line in self._status.splitlines()]
        if self._below:
            plain = [line if _ESCAPE in line else f"{_DIM}{line}{_PLAIN}" for line in lines]
            room = _DOWN * len(lines) + _BACK_UP * len(lines)
            self._err.write(room + _SAVE + "".join(f"{_NEXT_LINE_AND_ERASE}{line}" for line in plain) + _RESTORE)
        else:
            back = f"\033[{len(lines) - 1}A" if len(lines) > 1 else ""
            self._err.write("\r" + "\r\n".join(lines) + back)
        self._err.flush()


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar in bytes on stderr, if that is a terminal; yield `progress(done_bytes, total_bytes)`.

    A call with another total starts a new bar: first everything but the experts is read, then, if they fit, the experts.
    """
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            if bar.total != total_bytes:
                bar.reset(total_bytes)
            bar.update(done_bytes - bar.n)

        yield progress


def opening_bar(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Show such a bar while a model is opened."""
    return bytes_bar(f"Opening {name}")


def column_after(text: str, column: int, columns: int) -> int:
    """Return the column of the cursor after `text` on a terminal that wraps: 0..columns, where the last is after a full line.

    Args:
        text: what is written.
        column: of the cursor before.
        columns: of the terminal.
    """
    for character in text:
        if character in "\n\r":
            column = 0
        elif character == "\t":
            column = min(columns - 1, (column // 8 + 1) * 8)
        elif unicodedata.category(character) not in ("Mn", "Me", "Cf", "Cc"):
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            column = width if column + width > columns else column + width
    return column


def _size() -> tuple[int, int]:
    """Return columns and lines. A terminal that does not know its size says 0."""
    try:
        columns, lines = os.get_terminal_size(2)
    except OSError:
        columns, lines = 0, 0
    return columns or 80, lines or 24
