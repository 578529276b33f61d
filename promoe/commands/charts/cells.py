"""A map of cells in nine shades, stretched to whatever width there is. Text stands outside of the drawing, as HTML.

Cells of one shade are one path, so that thousands of them are some kilobytes. A script computes what a cell means, when it is
pointed at, from what the map carries; without scripts each row has a text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from promoe.commands.charts.style import LEVELS


class Axis(NamedTuple):
    """What the rows or columns of a map are: label, number, and (position from 0, name) of those that are named."""

    label: str
    size: int
    ticks: Sequence[tuple[int, str]]


def numbered(label: str, count: int, most: int) -> Axis:
    """Return an axis of numbers from 0, of which at most `most` are written."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 10**9) if count <= step * most)
    return Axis(label, count, [(i, str(i)) for i in range(0, count, step)])


def cell_map(
    shades: Sequence[Sequence[int]],
    rows: Axis,
    columns: Axis,
    height: float,
    spoken: str,
    *,
    row_tips: Sequence[str] = (),
    kind: str = "",
    content: Mapping[str, object] | None = None,
) -> str:
    """Draw the map of `shades[row][column]`, each 0 to LEVELS - 1.

    Args:
        shades: rows may have different lengths.
        rows: from top to bottom.
        columns: from left to right.
        height: of all rows, in px.
        spoken: what a screen reader says.
        row_tips: text of each row, for pages without scripts.
        kind: name of the content in the script.
        content: what the script computes the meaning of a cell from.
    """
    paths = "".join(f'<path class="h{shade}" d="{d}"/>' for shade, d in enumerate(_paths(shades)) if d)
    tips = "".join(
        f'<rect class="row-tip" y="{i}" width="{columns.size}" height="1"><title>{escape(tip)}</title></rect>'
        for i, tip in enumerate(row_tips)
    )
    box = f'viewBox="0 0 {max(1, columns.size)} {max(1, rows.size)}" preserveAspectRatio="none"'
    carried = "" if content is None else f' data-{kind}="{escape(json.dumps(content, separators=(",", ":")))}"'
    return (
        f'<div class="cells"><div class="y-name">{escape(rows.label)}</div>'
        f'<div class="y-ticks">{_ticks(rows, "top")}</div>'
        f'<div class="map"{carried}><svg {box} role="img" aria-label="{escape(spoken)}" style="height:{height:.0f}px">'
        f'{paths}{tips}</svg></div><div class="x-ticks">{_ticks(columns, "left")}</div>'
        f'<div class="x-name">{escape(columns.label)}</div></div>'
    )


def shade_scale(low: str, high: str) -> str:
    """Draw the legend of the shades."""
    spans = "".join(f'<span class="h{shade}"></span>' for shade in range(LEVELS))
    return f'<p class="scale">{escape(low)} <i>{spans}</i> {escape(high)}</p>'


def _paths(shades: Sequence[Sequence[int]]) -> list[str]:
    paths: list[list[str]] = [[] for _ in range(LEVELS)]
    for i, row in enumerate(shades):
        for j, shade in enumerate(row):
            paths[shade].append(f"M{j} {i}.5h.9")
    return ["".join(path) for path in paths]


def _ticks(axis: Axis, side: str) -> str:
    """Return the names of an axis, each in the middle of its row or column."""
    return "".join(
        f'<span style="{side}:{100 * (position + 0.5) / axis.size:.2f}%">{escape(name)}</span>'
        for position, name in axis.ticks
    )
