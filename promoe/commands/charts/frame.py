"""What every chart of the report has around its drawing: title, how to read it, legend, and its numbers as a table.

The table is closed at first. It is for whoever cannot see the drawing, or wants to copy from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 360
"""Of a drawing with text, in px: as wide as a phone, or a column of a wider page, so that text is never scaled much."""


class Numbers(NamedTuple):
    """A chart as a table: heads of the columns, of which the first names the rows; rows of cells."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def figure(
    title: str,
    subtitle: str,
    legend: Sequence[tuple[str, str]],
    drawing: str,
    numbers: Numbers,
    *,
    css: str = "",
    of: str = "",
) -> str:
    """A chart: `legend` is [(css class, name)]; `of` names the run where charts of two stand beside each other."""
    keys = "".join(f'<li><span class="key {css_}"></span>{escape(name)}</li>' for css_, name in legend)
    tag = f'<span class="tag">{escape(of)}</span>' if of else ""
    return (
        f'<figure class="chart {css}"><figcaption><h3>{escape(title)}{tag}</h3><p>{escape(subtitle)}</p></figcaption>'
        + (f'<ul class="legend">{keys}</ul>' if keys else "")
        + f'{drawing}<details class="data"><summary>Numbers</summary>'
        + f'<div class="scroll" role="region" aria-label="{escape(title)}: numbers" tabindex="0">'
        + f"{table(numbers)}</div></details></figure>"
    )


def table(numbers: Numbers) -> str:
    """The `<table>` element."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in numbers.heads)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, numbers.rows))}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    name, *values = cells
    sub = " class=sub" if name.startswith(" ") else ""
    data = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr><th scope="row"{sub}>{escape(name.strip())}</th>{data}</tr>'


def sentence(title: str, parts: Iterable[str]) -> str:
    """What a screen reader says of a drawing: `Title: one; another.`"""
    found = "; ".join(part for part in parts if part)
    return f"{title}: {found}." if found else f"{title}: nothing to show."
