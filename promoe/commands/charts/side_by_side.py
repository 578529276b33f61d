"""Two runs, chart by chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from promoe.commands.charts.section import Chart, introduction, layer_charts, numbers_card, wide_charts, words_card
from promoe.stats.run import Run


def chart_pairs(runs: Sequence[Run]) -> str:
    """Each chart of the first run beside the second's; on a phone below it. Wide ones are always below each other."""
    first, second = runs
    cards = "".join(
        f'<div class="intro"><h3>{escape(run.name)}</h3>{introduction(run)}</div>'
        f"{words_card(run, run.name)}{numbers_card(run, run.name)}"
        for run in runs
    )
    wide = _paired(*(list(wide_charts(run, runs, run.name)) for run in runs))
    narrow = _paired(*(list(layer_charts(run, runs, run.name)) for run in runs))
    stacked = "".join(f"{one}{other}" for one, other in _or_missing(wide, first, second))
    pairs = "".join(f'<div class="pair">{one}{other}</div>' for one, other in _or_missing(narrow, first, second))
    return f'<div class="columns">{cards}</div>{stacked}{pairs}'


Pair = tuple[str | None, str | None]


def _paired(first: Sequence[Chart], second: Sequence[Chart]) -> list[Pair]:
    """Charts of the same kind, in the order of whoever has more of them."""
    order = first if len(first) >= len(second) else second
    kinds = dict.fromkeys(chart.kind for chart in (*order, *first, *second))
    ones, others = ({chart.kind: chart.html for chart in charts} for charts in (first, second))
    return [(ones.get(kind), others.get(kind)) for kind in kinds]


def _or_missing(pairs: Iterable[Pair], first: Run, second: Run) -> Iterable[tuple[str, str]]:
    for one, other in pairs:
        yield one or _missing(first), other or _missing(second)


def _missing(run: Run) -> str:
    return f'<div class="card missing"><p class="rule">“{escape(run.name)}” has nothing to show here.</p></div>'
