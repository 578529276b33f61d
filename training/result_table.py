"""Shows the results of an evaluation as a table for a terminal of 120 columns: one row per kind and lookahead."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from promoe.units import DASH, aligned

GAP = "  "
WIDTH = 120
EVERY_LOOKAHEAD = "any"
# Explanations of the heads.
WORDS = {
    "all": "accuracy: share of the experts used that are predicted",
    "next": "next: likewise, of the next token's first k layers",
    "exact": "exact: share of tokens whose experts of a layer are all predicted, %",
    "cover": "cover: experts to fetch, in the order of their scores, to have all that are used",
    "Brier": "Brier: squared error of the probabilities, 0 is best",
}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of figures.

    Args:
        group: a head that neighbouring columns share; "" for none.
        head: its own head.
        cell: makes the text of a cell from the figures of one kind and lookahead.
    """

    group: str
    head: str
    cell: Callable[[Figures], str]


def accuracy_columns(result: dict[str, Any]) -> list[Column]:
    """Return the columns that do not depend on a cache, as far as the trace and the kinds have something to show."""
    every = [figures for by_lookahead in result.values() for figures in by_lookahead.values()]
    columns = [Column("accuracy, %", "all", lambda figures: percent(figures["accuracy"]))]
    for phase in ("prefill", "decode"):
        if any(figures[phase] for figures in every):
            columns.append(Column("accuracy, %", phase, _of_phase(phase)))
    if any(figures["next_token_accuracy"] is not None for figures in every):
        columns.append(Column("accuracy, %", "next", lambda figures: percent(figures["next_token_accuracy"])))
    columns.append(Column("", "exact", lambda figures: percent(figures["exact"])))
    columns.append(Column("", "cover", lambda figures: _decimal(figures["coverage_error"], 1)))
    if any(figures["calibration"] for figures in every):
        columns.append(Column("", "Brier", lambda figures: _decimal((figures["calibration"] or {}).get("brier"), 3)))
    return columns


def _of_phase(phase: str) -> Callable[[Figures], str]:
    return lambda figures: percent((figures[phase] or {}).get("accuracy"))


def cache_columns(caches: Iterable[tuple[str, str]], suffix: str, first: str, second: str) -> list[Column]:
    """Return a column for each (policy, rate) with two figures in whole percents, as `61/48`."""

    def column(policy: str, rate: str) -> Column:
        def cell(figures: Figures) -> str:
            found = figures["misses"][policy][rate]
            return f"{percent(found[first], 0)}/{percent(found[second], 0)}"

        return Column(policy + suffix, rate, cell)

    return [column(policy, rate) for policy, rate in caches]


def recall_columns(fetched: Iterable[int]) -> list[Column]:
    """Return a column for each number of fetched experts."""

    def column(count: int) -> Column:
        return Column("recall of fetched, %", str(count), lambda figures: percent(figures["recall"][str(count)]))

    return [column(count) for count in fetched]


def table(result: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    """Return the lines of the table. A kind whose figures are the same for every lookahead gets one row."""
    rows: list[list[str]] = []
    for kind, by_lookahead in result.items():
        cells = {lookahead: [column.cell(figures) for column in columns] for lookahead, figures in by_lookahead.items()}
        shown = [(row, by_lookahead[lookahead]["layers"]) for lookahead, row in cells.items()]
        if len(cells) > 1 and all(one == shown[0] for one in shown):
            cells = {EVERY_LOOKAHEAD: shown[0][0]}
        rows += [[kind if i == 0 else "", k, *row] for i, (k, row) in enumerate(cells.items())]
    head = ["kind", "k", *(column.head for column in columns)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    over = " " * _width(widths[:2])
    for name, group in groupby(range(len(columns)), key=lambda i: columns[i].group):
        first, *others = (i + 2 for i in group)
        mine = [widths[i] for i in (first, *others)]
        missing = max(0, len(name) - _width(mine))  # the first column of a narrow group makes room for its name
        head[first] = head[first].rjust(widths[first] + missing)
        width = _width(mine) + missing
        over += GAP + (f" {name} ".center(width, "─") if name and len(name) + 4 <= width else name.center(width))
    lines = aligned([head, *rows])
    return [over.rstrip(), *lines] if over.strip() else lines


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def legend(columns: Sequence[Column], *more: str) -> list[str]:
    """Return lines that explain these columns."""
    words = [WORDS[column.head] for column in columns if column.head in WORDS]
    return textwrap.wrap("; ".join([*words, *more]) + ".", WIDTH)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent, without the sign; a dash for None."""
    return _decimal(None if share is None else 100 * share, digits)


def _decimal(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
