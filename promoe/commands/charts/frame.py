"""The frame of every chart of the report: title, how to read it, legend, and its numbers as a table.

The table is closed at first. It is for readers who cannot see the drawing, or want to copy from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 360
"""Width of a drawing with text, in px: that of a phone, or of a column of a wider page, so that text is not scaled much."""


class Numbers(NamedTuple):
    """A chart as a table: heads of the columns, and rows of cells. The first column names the rows."""

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
    """Return the `<figure>` element of a chart.

    Args:
        title: what the chart shows.
        subtitle: one sentence on how to read it.
        legend: (css class, name) of each colour.
        drawing: HTML of the drawing.
        numbers: the same as a table.
        css: more classes of the element.
        of: name of the run, if charts of two runs stand beside each other.
    """
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
    """Return the `<table>` element. Rows whose name begins with a space are parts of the row above."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in numbers.heads)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, numbers.rows))}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    name, *values = cells
    sub = " class=sub" if name.startswith(" ") else ""
    data = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr><th scope="row"{sub}>{escape(name.strip())}</th>{data}</tr>'


def sentence(title: str, parts: Iterable[str]) -> str:
    """Return what a screen reader says about a drawing, in the form `Title: one; another`."""
    found = "; ".join(part for part in parts if part)
    return f"{title}: {found}." if found else f"{title}: nothing to show."
