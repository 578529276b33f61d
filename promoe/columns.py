"""How wide the sentences of a report are. Apart from `promoe.terminal`, whose bars `import promoe` does without."""

from __future__ import annotations

import shutil

NARROWEST_TEXT, WIDEST_TEXT = 60, 100


def text_columns() -> int:
    """Columns to wrap sentences at: those of the terminal (or $COLUMNS), 60 to 100; 100 without a terminal."""
    return max(NARROWEST_TEXT, min(WIDEST_TEXT, shutil.get_terminal_size((WIDEST_TEXT, 24)).columns))
