"""Wraps the text of reports. Progress bars are in `promoe.commands.terminal`, which `import promoe` does not need."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

NARROWEST_TEXT, WIDEST_TEXT = 60, 100


def text_columns() -> int:
    """Return the columns to wrap sentences at: those of the terminal (or $COLUMNS), 60 to 100; 100 without a terminal."""
    return max(NARROWEST_TEXT, min(WIDEST_TEXT, shutil.get_terminal_size((WIDEST_TEXT, 24)).columns))


def labelled(label: str, text: str, width: int, columns: int | None = None) -> list[str]:
    """Return lines with `label` in a column of `width` characters and the wrapped `text` beside it."""
    return textwrap.wrap(
        text,
        columns or text_columns(),
        initial_indent=label.ljust(width),
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bullets(sentences: Iterable[str]) -> list[str]:
    """Return each sentence as an item of a list, wrapped at `text_columns()`."""
    columns = text_columns()
    return [textwrap.fill(s, columns, initial_indent="  - ", subsequent_indent="    ") for s in sentences]
