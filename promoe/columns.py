"""How wide texts of a report are. Apart from `promoe.terminal`, whose bars `import promoe` does without."""

from __future__ import annotations

import shutil
import textwrap

NARROWEST_TEXT, WIDEST_TEXT = 60, 100


def text_columns() -> int:
    """Columns to wrap sentences at: those of the terminal (or $COLUMNS), 60 to 100; 100 without a terminal."""
    return max(NARROWEST_TEXT, min(WIDEST_TEXT, shutil.get_terminal_size((WIDEST_TEXT, 24)).columns))


def labelled(label: str, text: str, width: int) -> list[str]:
    """Lines with `label` in a column of so many characters, and `text` beside it, wrapped."""
    return textwrap.wrap(
        text,
        text_columns(),
        initial_indent=label.ljust(width),
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )
