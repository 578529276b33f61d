"""The results of an evaluation as a table for a terminal of 120 columns: one row per kind and lookahead."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from promoe.units import DASH

GAP = "  "
WIDTH = 120
EVERY_LOOKAHEAD = "any"
# What the heads mean, for whoever reads the table.
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
        group: what it shares a head with, if anything.
        head: its own.
        cell: of one kind and lookahead.
    """

    group: str
    head: str
    cell: Callable[[Figures], str]


def accuracy_columns(result: dict[str, Any]) -> list[Column]:
    """What does not depend on a cache, as far as the trace and the kinds have it."""
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
    """Two figures of each (policy, rate), whole percents, as `61/48`."""

    def column(policy: str, rate: str) -> Column:
        def cell(figures: Figures) -> str:
            found = figures["misses"][policy][rate]
            return f"{percent(found[first], 0)}/{percent(found[second], 0)}"

        return Column(policy + suffix, rate, cell)

    return [column(policy, rate) for policy, rate in caches]


def table(result: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    """Lines. A kind whose figures are the same for every lookahead gets one row."""
    rows: list[list[str]] = []
    for kind, by_lookahead in result.items():
        cells = {lookahead: [column.cell(figures) for column in columns] for lookahead, figures in by_lookahead.items()}
        if len(cells) > 1 and _all_equal([(row, by_lookahead[k]["layers"]) for k, row in cells.items()]):
            cells = {EVERY_LOOKAHEAD: next(iter(cells.values()))}
        rows += [[kind if i == 0 else "", k, *row] for i, (k, row) in enumerate(cells.items())]
    head = ["kind", "k", *(column.head for column in columns)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    groups = _groups(columns)
    for name, first, last in groups:  # a short group makes room for its name
        missing = len(name) - _width(widths[first + 2 : last + 2])
        widths[first + 2] += max(0, missing)
    lines = [_line(row, widths) for row in [head, *rows]]
    if any(name for name, _, _ in groups):
        over = "".join(_over(name, _width(widths[first + 2 : last + 2])) for name, first, last in groups)
        lines.insert(0, (" " * _width(widths[:2]) + over).rstrip())
    return lines


def _all_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def legend(columns: Sequence[Column], *more: str) -> list[str]:
    """Lines that say what is in these columns."""
    words = [WORDS[column.head] for column in columns if column.head in WORDS]
    return textwrap.wrap("; ".join([*words, *more]) + ".", WIDTH)


def _groups(columns: Sequence[Column]) -> list[tuple[str, int, int]]:
    """(name, first column, column after the last)."""
    result: list[tuple[str, int, int]] = []
    for i, column in enumerate(columns):
        if result and result[-1][0] == column.group:
            result[-1] = (column.group, result[-1][1], i + 1)
        else:
            result.append((column.group, i, i + 1))
    return result


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _over(name: str, width: int) -> str:
    return GAP + (f" {name} ".center(width, "─") if name and len(name) + 4 <= width else name.center(width))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return GAP.join([row[0].ljust(widths[0]), *cells]).rstrip()


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent, without the sign; a dash for None."""
    return _decimal(None if share is None else 100 * share, digits)


def _decimal(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
