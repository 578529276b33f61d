"""A table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from promoe.commands.bench.table import Row
from promoe.units import DASH


class Column(NamedTuple):
    """A column of a Markdown table: its head, and the cell of a row."""

    head: str
    cell: Callable[[Row], str]


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of the columns in which some row has a value, padded to one width."""
    cells = [[column.head for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    kept = [i for i in range(len(columns)) if any(line[i] != DASH for line in cells[1:])]
    widths = {i: max(len(line[i]) for line in cells) for i in kept}
    lines = [
        "| " + " | ".join(line[i].ljust(widths[i]) if i == 0 else line[i].rjust(widths[i]) for i in kept) + " |"
        for line in cells
    ]
    rule = "|" + "|".join(("-" * (widths[i] + 2)) if i == 0 else "-" * (widths[i] + 1) + ":" for i in kept) + "|"
    return [lines[0], rule, *lines[1:]]
